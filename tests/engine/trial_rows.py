"""Rows for the blocks that are tried before a training."""

from __future__ import annotations

import torch

from fluxtrain.data.batches import Batch

LENGTH = 12


def batch_of(rows: int) -> Batch:
    """`rows` rows of one document each, the same ones every time."""
    ids = torch.randint(0, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    count = rows * (LENGTH - 1)
    return Batch(
        input_ids=ids, labels=ids, position_ids=torch.arange(LENGTH).expand(rows, LENGTH),
        predicted=count, step_predicted=count, tokens=ids.numel(),
    )  # fmt: skip
