"""A fused multiply-add in plain torch, which has none: updates with narrow states need it."""

from __future__ import annotations

import torch
from torch import Tensor


def mul_add(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c of fp32 (a and c tensors or numbers), rounded once (IEEE 754, fusedMultiplyAdd).

    In double: the product of two fp32 is exact there, and the sum is rounded to odd, after which
    rounding to fp32 is as of the exact one (Boldo and Melquiond, Emulation of FMA and Correctly
    Rounded Sums: Proved Algorithms Using Rounding to Odd, 2008). What a sum loses is found by
    TwoSum (Knuth, The Art of Computer Programming 2, section 4.2.2).
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
