"""Rows for calibration."""

from __future__ import annotations

import torch

from fluxtrain.data.batches import Batch
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.methods.text_task import CausalLM

LENGTH = 12


def batch_of(rows: int) -> BoundBatch[Batch]:
    """Make `rows` rows of one document each, the same ones every time."""
    return BoundBatch(CausalLM(), plain_batch(rows))


def plain_batch(rows: int) -> Batch:
    """Make the same rows without their objective."""
    ids = torch.randint(0, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    count = rows * (LENGTH - 1)
    return Batch(
        input_ids=ids, labels=ids, position_ids=torch.arange(LENGTH).expand(rows, LENGTH),
        predicted=count, tokens=ids.numel(),
    )  # fmt: skip
