"""The 8-bit maps: bitsandbytes' values, the nearest code by every instruction set."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain import _native
from fluxtrain.optim import dynamic_map
from fluxtrain.optim.dynamic_map import BLOCK
from tests.engine.narrow_states import (
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


@SIGNS
def test_values_and_midpoints_within_a_decade_are_exact_in_fp32(signed: bool) -> None:
    exact = dynamic_map.magnitudes(signed=signed)
    assert [Fraction(float(torch.tensor(float(x)))) for x in exact] == exact


@ISAS
@SIGNS
def test_every_instruction_set_decodes_to_the_map(isa: str, signed: bool) -> None:
    _native.set_isa(isa)
    codes, got = torch.arange(256).to(torch.uint8), torch.empty(256)
    _native.kernel("decode8")(codes.data_ptr(), got.data_ptr(), 256, int(signed))
    assert same_bits(got, dynamic_map.values(signed=signed))


@ISAS
@SIGNS
def test_a_value_gets_the_nearest_code_also_beside_every_border(isa: str, signed: bool) -> None:
    _native.set_isa(isa)
    values = dynamic_map.values(signed=signed)
    middles = ((values[1:].double() + values[:-1].double()) / 2).float().abs()
    beside = (middles.view(torch.int32)[:, None] + torch.arange(-8, 9)).flatten()
    bits = torch.cat([beside, torch.randint(0, 0x3F800001, (20_000,))]).clamp(min=0)
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([x, -x]) if signed else x
    got = torch.empty(x.numel(), dtype=torch.uint8)
    _native.kernel("encode8")(x.data_ptr(), got.data_ptr(), x.numel(), int(signed))
    distance = (values.double() - x.double()[:, None]).abs()
    if not signed:
        distance[x > 0, 0] = math.inf  # zero stands for zero alone
    least = distance.amin(1, keepdim=True)
    # of equally near codes the one further from zero
    tied = torch.where(distance == least, values.double().abs(), -1.0)
    assert torch.equal(got.long(), tied.argmax(1))
    assert same_bits(got, dynamic_map.nearest(x, signed=signed))


@SIGNS
@given(n=st.integers(1, 700), seed=st.integers(0, 2**20), power=st.integers(-120, 120))
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
    assert (error <= least + 1e-6 * x.abs() + 2.0**-149).all()


# -- the updates ---------------------------------------------------------------------------------


@SIGNS
def test_a_kernels_guess_lies_beside_the_nearest_code(signed: bool) -> None:
    """What a kernel on another device searches with: a guess, and exact borders to correct it."""
    table = dynamic_map.search_table(signed=signed)
    begins, slopes, offsets, borders = table[:7], table[8:16], table[16:24], table[25:]
    exact = borders[:-1].contiguous()
    beside = (exact.view(torch.int32)[:, None] + torch.arange(-20, 21)).flatten()
    bits = torch.cat([beside, torch.randint(0, 0x3F800001, (200_000,))]).to(torch.int32)
    x = bits.view(torch.float32)
    decade = (x[:, None] >= begins).sum(1)
    guess = (x * slopes[decade] + offsets[decade]).int()
    wanted = torch.searchsorted(exact, x, right=True)
    assert table.numel() == 25 + (129 if signed else 256)
    assert int((guess - wanted).abs().max()) <= 1
    assert int(guess.min()) >= 0
