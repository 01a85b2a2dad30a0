"""The 8-bit maps of the block-wise optimizer states: which fraction a code stands for.

They are bitsandbytes' dynamic maps (Dettmers, 8-Bit Approximations for Parallelism in Deep
Learning, 2015; create_dynamic_map in its functional.py): codes in ascending order of their values,
seven decades below 1 with 1, 2, 4 ... 64 values of each sign (signed) or 2 ... 128 (unsigned), and
0 and 1. Within a decade values are linear in the code; here slope and offset are rounded to a
binary grid so that values and midpoints are exact in fp32. Values are within 1e-4 of bitsandbytes'
own; neighbours are 7e-3 apart or more.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from fluxtrain.plan.states import STATE_BLOCK

BLOCK = STATE_BLOCK
LEAST_SCALE = 2.0**-126
_DECADES = 7
_SIGNED_BITS, _UNSIGNED_BITS = 16, 15  # of a slope: times a code it has 24 bits at most


def magnitudes(*, signed: bool) -> list[Fraction]:
    """The values that are not negative, from 0 to 1, exactly."""
    values = [Fraction(0)]
    for decade in range(_DECADES):
        count = (1 if signed else 2) << decade
        first = len(values)
        power = Fraction(10) ** (decade - _DECADES + 1)
        slope = power * Fraction(9, 10) / count
        bits = _SIGNED_BITS if signed else _UNSIGNED_BITS
        grid = Fraction(2) ** (math.floor(math.log2(slope)) - bits + 1)
        steps = round(slope / grid)
        middle = Fraction(2 * first + count - 1, 2)
        offset = round((power * Fraction(11, 20) - steps * grid * middle) / grid)
        values += [(steps * k + offset) * grid for k in range(first, first + count)]
    return [*values, Fraction(1)]


@lru_cache(maxsize=2)
def values(*, signed: bool) -> Tensor:
    """What codes 0 to 255 stand for: (256,) fp32, ascending."""
    positive = magnitudes(signed=signed)
    # -1 is not in the map: 127 values below zero, 128 above it
    negative = [-x for x in positive[-2:0:-1]] if signed else []
    return torch.tensor([float(x) for x in [*negative, *positive]], dtype=torch.float32)


@lru_cache(maxsize=2)
def _borders(signed: bool) -> Tensor:
    """The smallest fp32 magnitude that is at least as near to the next value as to this one."""
    exact = magnitudes(signed=signed)
    found = []
    for low, high in itertools.pairwise(exact):
        middle = (low + high) / 2
        near = torch.tensor(float(middle), dtype=torch.float32)
        if Fraction(float(near)) < middle:
            near = torch.nextafter(near, torch.tensor(math.inf))
        found.append(near)
    return torch.stack(found)


def search_table(*, signed: bool) -> Tensor:
    """For kernels: where the next decade begins (8 fp32), slope and offset of a guess at the number
    of codes between zero and x within a decade (8 and 8), minus infinity, and the exact borders.

    The guess is the nearest code's number, or one beside it.
    """
    borders = [*_borders(signed).tolist(), math.inf]
    begins, slopes, offsets = [], [], []
    for decade in range(_DECADES):
        count = (1 if signed else 2) << decade
        first = 1 + (1 if signed else 2) * ((1 << decade) - 1)
        begins.append(borders[first + count - 1])
        below = borders[max(0, first - 1 + (decade > 0))]
        if decade == 0:  # below its first value lies zero, at another distance
            slopes.append((count + 0.75) / (begins[0] - below))
        else:
            slopes.append(1 / (borders[first + 1] - below))
        # A border has the number above it; past the last one of a decade comes a longer gap.
        offsets.append(first + (0.75 if decade else 0.0) - below * slopes[-1])
    table = [*begins, math.inf, *slopes, 0.0, *offsets, len(borders) - 1.0, -math.inf, *borders]
    return torch.tensor(table, dtype=torch.float32)


def nearest(x: Tensor, *, signed: bool) -> Tensor:
    """The code (uint8) of the value nearest to each finite fp32 `x` in [-1, 1] ([0, 1] unsigned).

    Of two equally near ones the one further from zero. The unsigned map gives 0 for 0 alone: what
    is not zero must not become a second moment of zero, by which the update would be divided.
    """
    step = torch.searchsorted(_borders(signed).to(x.device), x.abs().contiguous(), right=True)
    if not signed:
        return torch.where(x > 0, step.clamp(min=1), step).to(torch.uint8)
    towards = torch.where(torch.signbit(x), -step, step)
    return (towards + 127).clamp(min=0).to(torch.uint8)


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Flat finite fp32 `x` as codes (n,) uint8 and scales (blocks of 256 elements,) fp32."""
    n = x.numel()
    padded = torch.nn.functional.pad(x, (0, -n % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1).clamp(min=LEAST_SCALE)
    codes = nearest(padded * (1.0 / scales)[:, None], signed=signed)
    return codes.view(-1)[:n], scales


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values (n,) of `codes` (n,) uint8 with `scales` (blocks,) fp32."""
    fractions = values(signed=signed).to(codes.device)[codes.int()]
    return fractions * scales.repeat_interleave(BLOCK)[: codes.numel()]
