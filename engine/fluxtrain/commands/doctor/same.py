"""Compare two sets of tensors bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mismatch(Exception):
    """Raised when two results that must be equal differ; the message says by how much."""


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    """Compare the bits of all values, also of NaNs and of both zeros, and return their number.

    Raises Mismatch at the first difference.
    """
    if one.keys() != other.keys():
        lacking = sorted(one.keys() ^ other.keys())
        raise Mismatch(f"only one side has {lacking[0]!r} ({len(lacking)} such)")
    count = different = 0
    first: str | None = None
    for name, left in one.items():
        right = other[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            raise Mismatch(f"{name}: {left.dtype} {tuple(left.shape)} is not {right.dtype} "
                           f"{tuple(right.shape)}")  # fmt: skip
        wrong = int((_bits(left) != _bits(right)).sum())
        if wrong and first is None:
            first = name
        different += wrong
        count += left.numel()
    if different:
        raise Mismatch(f"{different:,} of {count:,} values differ, the first in {first}")
    return count


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])
