"""Tell transformers whether rows are packed, instead of letting it ask the device.

To build its mask transformers looks at the position ids of every batch (`.all()` of a tensor), for
which the host waits until the device has finished the previous step. The code that packed the rows
knows the answer already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

_NAME = "find_packed_sequence_indices"


@contextmanager
def known_packing(*, mixes: bool) -> Iterator[None]:
    """Let transformers build masks for rows of several documents (`mixes`), or of one each.

    Does nothing with a version of transformers that asks in another way.
    """
    library: Any = masking_utils
    asked = getattr(library, _NAME, None)
    if asked is None:
        yield
        return
    setattr(library, _NAME, _documents if mixes else _none)
    try:
        yield
    finally:
        setattr(library, _NAME, asked)


def _none(_position_ids: Tensor) -> None:
    return None


def _documents(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document within its row; position_ids: (B, T)."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
