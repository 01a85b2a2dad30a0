"""The 8-bit maps of the block-wise optimizer states: which fraction a code stands for.

They are bitsandbytes' dynamic maps (Dettmers, 8-Bit Approximations for Parallelism in Deep
Learning, 2015; create_dynamic_map in its functional.py): codes in ascending order of their values,
seven decades below 1 with 1, 2, 4 ... 64 values of each sign (signed) or 2 ... 128 (unsigned), and
0 and 1. Within a decade values are linear in the code; here slope and offset are rounded to a
binary grid so that values are exact in fp32. Values are within 1e-4 of bitsandbytes' own;
neighbours are 7e-3 apart or more.

The code of a fraction is the integer part of a linear function of y, which is the fraction times a
constant of the map. Each decade has its own line; it is an integer where two values are equally
near. The line is rounded to fp32 once and the borders between decades to bf16, so close to a
midpoint either neighbour may come out, the same one everywhere (native/src/map8.h says how close).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fluxtrain.core.adamw.fp32 import mul_add
from fluxtrain.plan.states import STATE_BLOCK

BLOCK = STATE_BLOCK
LEAST_DECAYED = 2.0**-80  # a scale that decays below it becomes 0 for m, and this value for v
LEAST_SCALE = 2 * LEAST_DECAYED
SIGNED_SCALE, UNSIGNED_SCALE = 4239 / 65536, 6155 / 131072  # y divided by the fraction
LEAST_Y = 2.0**-26  # smaller ones have its code, but for zero
TELLS_ZERO = 2.0**-126  # taken off an unsigned y: then zero alone has a sign
DECADES = 7
_SIGNED_BITS, _UNSIGNED_BITS = 16, 15  # of a slope: times a code it has 24 bits at most


class Decade(NamedTuple):
    """Values slope * k + offset of `size` codes, k from `first` on the codes above zero."""

    first: int
    size: int
    slope: Fraction
    offset: Fraction


def decades(*, signed: bool) -> list[Decade]:
    """Return the seven decades of the values between 0 and 1, exactly."""
    found, first = [], 1
    for decade in range(DECADES):
        count = (1 if signed else 2) << decade
        power = Fraction(10) ** (decade - DECADES + 1)
        slope = power * Fraction(9, 10) / count
        bits = _SIGNED_BITS if signed else _UNSIGNED_BITS
        grid = Fraction(2) ** (math.floor(math.log2(slope)) - bits + 1)
        steps = round(slope / grid)
        middle = Fraction(2 * first + count - 1, 2)
        offset = round((power * Fraction(11, 20) - steps * grid * middle) / grid)
        found.append(Decade(first, count, steps * grid, offset * grid))
        first += count
    return found


def magnitudes(*, signed: bool) -> list[Fraction]:
    """Return the values that are not negative, from 0 to 1, exactly."""
    between = [
        slope * k + offset
        for first, count, slope, offset in decades(signed=signed)
        for k in range(first, first + count)
    ]
    return [Fraction(0), *between, Fraction(1)]


@lru_cache(maxsize=2)
def values(*, signed: bool) -> Tensor:
    """Return the values of codes 0 to 255: (256,) fp32, ascending."""
    positive = magnitudes(signed=signed)
    # -1 is not in the map: 127 values below zero, 128 above it
    negative = [-x for x in positive[-2:0:-1]] if signed else []
    return torch.tensor([float(x) for x in [*negative, *positive]], dtype=torch.float32)


@lru_cache(maxsize=2)
def value_table(*, signed: bool) -> Tensor:
    """Return slope and offset of each code's line: (2, 256) fp32. The line is a function of the
    number of codes between the code and zero (signed), or one more (unsigned)."""
    last = 128 if signed else 255
    line = float(torch.tensor(1 / last))  # of zero and of one
    ends = [(line, 0.0 if signed else -line)]
    between = [
        (float(slope), float(offset if signed else offset - slope))
        for _, count, slope, offset in decades(signed=signed)
        for _ in range(count)
    ]
    positive = [*ends, *between, *ends]
    by_code = [*positive[-2:0:-1], *positive] if signed else positive
    return torch.tensor(by_code, dtype=torch.float32).T.contiguous()


@lru_cache(maxsize=2)
def line_table(*, signed: bool) -> Tensor:
    """Return for each decade, and for 1, the border to the next, slope and offset of the line in y
    and the line's largest value: (4, 8) fp32.

    Bits 16 to 23 of the line are k (signed) or k + 1 (unsigned), modulo 256. From 128 on a unit of
    k is 1, from 256 on, for the longest decade, it is 2.
    """
    exact, scale = magnitudes(signed=signed), Fraction(to_y(signed=signed))
    rows = []
    for decade, (first, count, slope, offset) in enumerate(decades(signed=signed)):
        last = first + count - 1
        rise, at_zero = 1 / slope, Fraction(1, 2) - offset / slope
        if decade == 0:  # zero lies at another distance, and unsigned it stands for itself alone
            rise = 1 / exact[1] if signed else 1 / (exact[1] + exact[2])
            at_zero = Fraction(1, 2) if signed else Fraction(3, 2)
        wide = not signed and decade == DECADES - 1
        unit, base = (2, 2) if wide else (1, 128 if signed else 129)
        begins = (exact[last] + exact[last + 1]) / 2 * scale
        most = base + unit * (last + Fraction(3, 4))
        line = (unit * rise / scale, base + unit * at_zero, most)
        rows.append([float(torch.tensor(float(begins)).bfloat16()), *map(float, line)])
    one = 256.5 if signed else 512.5
    return torch.tensor([*rows, [math.inf, 0.0, one, one]], dtype=torch.float32).T.contiguous()


def to_y(*, signed: bool) -> float:
    """Return the constant that, divided by a block's scale, converts its values to y."""
    return SIGNED_SCALE if signed else UNSIGNED_SCALE


def codes_of(x: Tensor, factor: Tensor, *, signed: bool) -> Tensor:
    """Return the codes (uint8) of finite fp32 `x`; the factor that converts `x` to y is `to_y` over
    a scale that |x| does not exceed.

    The unsigned map gives code 0 only for 0 (and for less than 2^-121 of the scale): a second
    moment that is not zero must not become zero, because the update divides by it.
    """
    signed_y = x * factor if signed else mul_add(x, factor.expand_as(x), -TELLS_ZERO)
    y = signed_y.abs().clamp(min=LEAST_Y)
    begins, slope, offset, most = line_table(signed=signed).to(x.device)
    decade = torch.searchsorted(begins, y.contiguous(), right=True)
    line = torch.minimum(mul_add(slope[decade], y, offset[decade]), most[decade])
    k = (line.view(torch.int32) >> 16) & 0xFF
    if signed:
        return (127 + torch.where(torch.signbit(signed_y), -k, k)).clamp(min=0).to(torch.uint8)
    return torch.where(torch.signbit(signed_y), 0, (k - 1) & 0xFF).to(torch.uint8)


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise flat finite fp32 `x`; return codes (n,) uint8 and scales (blocks of 256 elements,)
    fp32."""
    n = x.numel()
    padded = torch.nn.functional.pad(x, (0, -n % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1).clamp(min=LEAST_SCALE)
    factors = torch.full_like(scales, to_y(signed=signed)) / scales  # of a number it rounds twice
    codes = codes_of(padded, factors[:, None], signed=signed)
    return codes.view(-1)[:n], scales


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the fp32 values (n,) of `codes` (n,) uint8 with `scales` (blocks,) fp32."""
    fractions = values(signed=signed).to(codes.device)[codes.int()]
    return fractions * scales.repeat_interleave(BLOCK)[: codes.numel()]


def decayed(codes: Tensor, scales: Tensor, beta: float, *, signed: bool) -> Tensor:
    """Return the values (n,) of `codes` decayed by `beta`, in a kernel's order of operations."""
    left = scales * beta
    left = torch.where(left >= LEAST_DECAYED, left, 0.0 if signed else LEAST_DECAYED)
    left = left.repeat_interleave(BLOCK)[: codes.numel()]
    code = codes.int()
    slope, offset = value_table(signed=signed).to(codes.device)
    offset = offset[code] * left
    if signed:
        offset = torch.where(code < 127, -offset, offset)
    return mul_add(slope[code] * left, (code - 127 if signed else code + 1).float(), offset)
