"""fp32 arithmetic that torch lacks, or does not round correctly everywhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mul_add(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """Return a * b + c of fp32 (tensors or numbers), rounded once (IEEE 754, fusedMultiplyAdd).

    Computed in double: the product of two fp32 is exact there, and the sum is rounded to odd, after
    which rounding to fp32 equals rounding the exact sum (Boldo and Melquiond, Emulation of FMA and
    Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd, 2008). TwoSum finds the error
    of a sum (Knuth, The Art of Computer Programming 2, section 4.2.2).
    """
    product = b.double() * (a.double() if isinstance(a, Tensor) else a)
    addend = c.double() if isinstance(c, Tensor) else torch.full_like(product, c)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    # Towards what was lost: away from zero where both have one sign.
    towards = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = torch.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def rounded_sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded fp32 square root of fp32 `x`.

    torch's CPU build hands large tensors to MKL, whose fp32 root is off by one bit for one value in
    3,000; a root in double rounded to fp32 is exact. CUDA's fp32 root is correctly rounded.
    """
    return torch.sqrt(x) if x.is_cuda else torch.sqrt(x.double()).float()


def quiet(x: Tensor) -> Tensor:
    """Replace every NaN in `x` by 0x7fc00000, the one NaN that all implementations store."""
    return torch.nan_to_num(x, nan=math.nan, posinf=math.inf, neginf=-math.inf)
