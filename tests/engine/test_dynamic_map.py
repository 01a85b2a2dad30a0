"""The 8-bit maps: bitsandbytes' values, the code of the nearest one by every instruction set."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fluxtrain import _native
from fluxtrain.core.adamw import dynamic_map
from fluxtrain.core.adamw.dynamic_map import BLOCK
from fluxtrain.core.adamw.fp32 import mul_add
from fluxtrain.core.adamw.kernels import quantise
from tests.engine.low_bit_states import (
    ISAS,
    SIGNS,
    any_floats,
    same_bits,
)

pytestmark = pytest.mark.usefixtures("isa_put_back")


@SIGNS
def test_the_map_is_bitsandbytes_dynamic_map(signed: bool) -> None:
    expected = [0.0, 1.0]
    for decade in range(7):
        count = (1 if signed else 2) << decade
        borders = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        means = 10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2
        expected += means.tolist() + ((-means).tolist() if signed else [])
    wanted = torch.tensor(sorted(expected), dtype=torch.float64)
    got = dynamic_map.values(signed=signed).double()
    assert got.numel() == 256
    assert torch.allclose(got, wanted, rtol=1e-4, atol=0)
    assert (got.diff() > 0).all()


@ISAS
@SIGNS
def test_every_instruction_set_decodes_to_the_map(isa: str, signed: bool) -> None:
    _native.set_isa(isa)
    codes, got = torch.arange(256).to(torch.uint8), torch.empty(256)
    _native.kernel("decode8")(codes.data_ptr(), got.data_ptr(), 256, int(signed))
    assert same_bits(got, dynamic_map.values(signed=signed))


@ISAS
@SIGNS
def test_a_value_gets_the_nearest_code_but_for_next_to_nothing(isa: str, signed: bool) -> None:
    _native.set_isa(isa)
    values = dynamic_map.values(signed=signed)
    middles = ((values[1:].double() + values[:-1].double()) / 2).float().abs()
    beside = (middles.view(torch.int32)[:, None] + torch.arange(-40, 41)).flatten()
    bits = torch.cat([beside, torch.randint(0, 0x3F800001, (20_000,))]).clamp(min=0)
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([x, -x]) if signed else x
    got = torch.empty(x.numel(), dtype=torch.uint8)
    _native.kernel("encode8")(x.data_ptr(), got.data_ptr(), x.numel(), int(signed))
    distance = (values.double() - x.double()[:, None]).abs()
    factor = torch.tensor(dynamic_map.to_y(signed=signed))
    if not signed:  # zero stands for zero alone, and for what is less than normal
        is_zero = x * factor < dynamic_map.TELLS_ZERO
        distance[~is_zero, 0] = math.inf
        distance[is_zero, 1:] = math.inf
    nearest, its_code = distance.min(1)
    excess = distance.gather(1, got.long()[:, None])[:, 0] - nearest
    gap = (values.double()[its_code] - values.double()[got.long()]).abs()
    between_decades = _between_decades(got, its_code, signed)
    # twice what it is away from the midpoint
    assert (excess <= torch.where(between_decades, 0.016, 2.0**-14) * gap).all()
    assert (got == its_code).float().mean() > 0.8  # most of these lie beside a border
    assert same_bits(got, dynamic_map.codes_of(x, factor, signed=signed))


def _between_decades(a: Tensor, b: Tensor, signed: bool) -> Tensor:
    """Whether two codes are the last of a decade and the first of the next, or one."""
    firsts = [decade.first for decade in dynamic_map.decades(signed=signed)[1:]]
    first = torch.tensor([*firsts, 128 if signed else 255])
    k = torch.stack([a.int(), b.int()]) - (127 if signed else 0)
    upper, lower = k.abs().amax(0), k.abs().amin(0)
    return (upper - lower == 1) & torch.isin(upper, first)


@SIGNS
@given(n=st.integers(1, 700), seed=st.integers(0, 2**20), power=st.integers(-75, 120))
@settings(max_examples=30)
def test_a_block_comes_back_as_near_as_the_map_allows(
    signed: bool, n: int, seed: int, power: int
) -> None:
    x = any_floats(n, seed, False) * 2.0**power
    x = x if signed else x.abs()
    codes, scales = dynamic_map.quantise(x, signed=signed)
    back = dynamic_map.dequantise(codes, scales, signed=signed)
    wide = scales.repeat_interleave(BLOCK)[:n, None].double()
    offered = dynamic_map.values(signed=signed).double() * wide
    if not signed:
        offered[x > 0, 0] = math.inf  # zero stands for zero alone
    least = (offered - x[:, None]).abs().amin(1)
    error = (back.double() - x).abs()
    # the fraction x / scale is rounded to fp32 before its code is looked for
    assert (error <= least * 1.04 + 1e-6 * x.abs() + 2.0**-149).all()


@ISAS
@SIGNS
@given(n=st.integers(1, 1500), seed=st.integers(0, 2**20), wild=st.booleans())
@settings(max_examples=20)
def test_moments_of_another_format_get_the_oracles_codes(
    isa: str, signed: bool, n: int, seed: int, wild: bool
) -> None:
    _native.set_isa(isa)
    x = any_floats(n, seed, wild)
    x = x if signed else x.abs()
    codes, scales = quantise(x, signed=signed)
    finite = torch.where(torch.isfinite(x), x, 0.0)
    expected = dynamic_map.quantise(finite, signed=signed)
    assert same_bits(codes, expected[0])
    assert same_bits(scales, expected[1])


def test_what_is_beneath_all_scales_counts_as_little_or_nothing() -> None:
    x = torch.tensor([1e-28, -1e-28, 1e-31, 0.0])
    codes, scales = dynamic_map.quantise(x, signed=True)
    assert scales.tolist() == [dynamic_map.LEAST_SCALE]
    assert dynamic_map.dequantise(codes, scales, signed=True)[2:].tolist() == [0.0, 0.0]
    codes, scales = dynamic_map.quantise(x.abs(), signed=False)
    back = dynamic_map.dequantise(codes, scales, signed=False)
    assert back[3] == 0
    assert (back[:3] > 0).all()


@SIGNS
@given(
    seed=st.integers(0, 2**20), beta=st.floats(0, 1, exclude_max=True), power=st.integers(-90, 90)
)
@settings(max_examples=30)
def test_what_a_step_leaves_is_beta_times_the_values(
    signed: bool, seed: int, beta: float, power: int
) -> None:
    codes = torch.randint(0, 256, (2 * BLOCK,), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    scales = torch.tensor([2.0**power, 1.7 * 2.0**power])
    got = dynamic_map.decayed(codes, scales, beta, signed=signed).double()
    left = scales.double() * beta
    least = 0.0 if signed else dynamic_map.LEAST_DECAYED
    left = torch.where(left.float() >= dynamic_map.LEAST_DECAYED, left, least)
    exact = dynamic_map.values(signed=signed).double()[codes.int()] * left.repeat_interleave(BLOCK)
    assert torch.allclose(got, exact, rtol=2e-6, atol=0)
    assert not (got[exact == 0]).any()


# -- the operation that torch does not have ------------------------------------------------------


@given(seed=st.integers(0, 2**20), spread=st.integers(0, 60))
@settings(max_examples=30)
def test_a_fused_multiply_add_is_rounded_once(seed: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (any_floats(200, seed + i, False) for i in range(3))
    c = c * 2.0 ** torch.randint(-spread, spread + 1, (200,), generator=generator)
    c[::3] = -(a * b)[::3]  # cancels all but what a product loses
    c[1::7] = 0.0
    got = mul_add(a, b, c)
    for one, x, y, z in zip(got.tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = torch.tensor(one)
        around = [torch.nextafter(near, torch.tensor(end)) for end in (-math.inf, math.inf)]
        nearest = min(abs(Fraction(float(other)) - exact) for other in around)
        assert abs(Fraction(one) - exact) <= nearest
