"""AdamW with 8-bit and bf16 states: native kernels, torch and the oracle give the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fluxtrain import _native
from fluxtrain.core.adamw import dynamic_map, reference
from fluxtrain.core.adamw.dynamic_map import BLOCK
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.fp32 import quiet
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper, coefficients
from fluxtrain.core.adamw.kernels import step_
from fluxtrain.core.adamw.reference import States8, decode, rounding
from tests.engine.low_bit_states import (
    HYPER,
    ISAS,
    KINDS,
    LAYOUTS,
    Held,
    any_floats,
    same_bits,
)

pytestmark = pytest.mark.usefixtures("isa_put_back")


@ISAS
@KINDS
@LAYOUTS
@settings(max_examples=20)
@given(n=st.integers(1, 800), seed=st.integers(0, 2**20), wild=st.booleans(), scale=st.floats(0, 2))
def test_the_native_update_has_the_oracles_bits(
    isa: str, kind: str, layout: tuple[str, torch.dtype], n: int, seed: int, wild: bool,
    scale: float,
) -> None:  # fmt: skip
    _native.set_isa(isa)
    got = Held(kind, layout[0], n, seed, wild)
    expected = got.copy()
    for step in (1, 2, 3):
        grad = any_floats(n, seed + step, wild).to(layout[1])
        expected.oracle_step(grad, step, scale)
        got.step(grad, step, scale)
        assert got.equals(expected)


@ISAS
@LAYOUTS
@pytest.mark.parametrize("n", [1, 31, 63, 64, 95, 20_011])
@pytest.mark.parametrize("first", [0, 64, 1000, 1023, 2**32 - 50, 2**32 - 5000])
def test_ranges_of_bf16_states_round_as_the_oracle_wherever_they_begin(
    isa: str, layout: tuple[str, torch.dtype], first: int, n: int
) -> None:
    """They look up most of their random numbers, which do not begin anew with a range."""
    _native.set_isa(isa)
    from_first = rounding(7, 1, first)
    got = Held("bf16", layout[0], n, seed=first, wild=True)
    grad = any_floats(n, 21, True).to(layout[1])
    master = got.weights if got.lo is None else decode(got.weights, got.lo)
    c = coefficients(HYPER, 1)
    m, v = got.states
    expected, *moments = reference.adamw16(master, m, v, grad, c, from_first)
    step_(got.flat(grad, from_first), AdamWUpdate(hyper=HYPER, step=1))
    assert all(same_bits(x, y) for x, y in zip(got.states, moments, strict=True))
    updated = got.weights if got.lo is None else decode(got.weights, got.lo)
    assert same_bits(updated, expected)


@KINDS
@pytest.mark.parametrize("slice_elements", [256, 1024, 1 << 22])
def test_the_update_by_torch_has_the_oracles_bits(kind: str, slice_elements: int) -> None:
    got = Held(kind, "split", 3001, seed=3, wild=True)
    expected = got.copy()
    for step in (1, 2):
        grad = any_floats(3001, 30 + step, True).bfloat16()
        expected.oracle_step(grad, step)
        got.step(grad, step, by_torch=True, slice_elements=slice_elements)
    assert got.equals(expected)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_what_is_zero_stays_zero(kind: str) -> None:
    """Padding between parameters lies in ranges that are updated as a whole."""
    held = Held(kind, "split", 300, seed=2)
    held.weights.zero_()
    assert held.lo is not None
    held.lo.zero_()
    for step in (1, 2, 3):
        held.step(torch.zeros(300, dtype=torch.bfloat16), step)
    assert not held.weights.float().any()
    moments = held.states[:2]
    if kind == "8bit":
        states = States8(*held.states)
        moments = (
            dynamic_map.dequantise(states.m, states.m_scale, signed=True),
            dynamic_map.dequantise(states.v, states.v_scale, signed=False),
        )
    assert all(not moment.any() for moment in moments)


def test_v_never_becomes_zero_while_gradients_come() -> None:
    """Or the update would be divided by eps alone: beside a large neighbour v is tiny, not zero."""
    held = Held("8bit", "fp32", BLOCK, seed=8)
    grad = torch.full((BLOCK,), 1e-5)
    grad[0] = 10.0
    for step in range(1, 30):
        before = held.weights.clone()
        held.step(grad, step)
        assert (held.weights - before).abs().max() < 5 * HYPER.lr


@ISAS
@pytest.mark.parametrize(("beta2", "scale"), [(0.999, 2.0**-90), (0.4, 2.0**-79)])
def test_a_step_is_not_divided_by_eps_alone_where_scales_are_the_least(
    isa: str, beta2: float, scale: float
) -> None:
    """As in a checkpoint of before there was a least scale, and where a step takes one below it."""
    _native.set_isa(isa)
    hyper = Hyper(lr=1e-3, betas=(0.9, beta2), eps=1e-15, weight_decay=0.0)
    codes = torch.full((BLOCK,), 255, dtype=torch.uint8)
    scales = torch.tensor([math.sqrt(scale)]), torch.tensor([scale])
    weights = torch.ones(BLOCK)
    flat = Flat(
        weights=weights, m=codes, v=codes.clone(), m_scale=scales[0], v_scale=scales[1],
        gradient=torch.zeros(BLOCK),
    )  # fmt: skip
    step_(flat, AdamWUpdate(hyper=hyper, step=600))
    assert (weights - 1).abs().max() <= 2 * hyper.lr


def test_random_rounding_is_right_on_average_and_leaves_bf16_alone() -> None:
    n = 200_000
    exact = torch.full((n,), 1.0 + 2.0**-7 * 0.3)  # between two neighbouring bf16
    bits = reference.random_bits(rounding(3, 5, 0), n)
    rounded = reference._rounded(exact, bits & 0xFFFF)
    assert set(rounded.float().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(rounded.float().mean().item() - exact[0].item()) < 4 * 2.0**-7 * 0.5 / math.sqrt(n)
    kept = any_floats(n, 12, True).bfloat16()
    again = reference._rounded(quiet(kept.float()), bits >> 16)
    number = ~torch.isnan(kept)
    assert same_bits(again[number], kept[number])
    assert torch.isnan(again[~number]).all()


def test_steps_seeds_and_elements_have_random_bits_of_their_own() -> None:
    n = 1 << 14
    draws = [reference.random_bits(rounding(s, t, 0), n) for s, t in ((1, 1), (1, 2), (2, 1))]
    for i, a in enumerate(draws):
        assert a.unique().numel() > 0.999 * n
        for b in draws[:i]:
            assert (a == b).float().mean() < 0.001
            low = torch.corrcoef(torch.stack([a & 0xFFFF, b & 0xFFFF]).double())[0, 1]
            assert abs(low.item()) < 0.04
    later = reference.random_bits(rounding(1, 1, 100), n - 100)
    assert torch.equal(later, draws[0][100:])


def test_bitsandbytes_trains_to_nearly_the_same() -> None:
    """Its search for codes is approximate on a processor, so only scales are compared closely."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    n = 16 * BLOCK
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=generator) * 0.02
    theirs = nn.Parameter(start.clone())
    optimizer = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-3, weight_decay=0.1)
    ours, wide = start.clone(), start.clone()
    states = States8(*(torch.zeros(n, dtype=torch.uint8) for _ in range(2)),
                     *(torch.zeros(16) for _ in range(2)))  # fmt: skip
    m, v = torch.zeros(n), torch.zeros(n)
    hyper = Hyper(lr=1e-3, weight_decay=0.1)
    sizes = 10.0 ** (torch.rand(n, generator=generator) * 3 - 5)
    for step in range(1, 31):
        grad = (torch.randn(n, generator=generator) + 1) * sizes
        theirs.grad = grad.clone()
        optimizer.step()
        update = AdamWUpdate(hyper=hyper, step=step)
        step_(Flat(weights=ours, gradient=grad, **states._asdict()), update)
        step_(Flat(weights=wide, m=m, v=v, gradient=grad), update)
    held = optimizer.state[theirs]
    assert torch.allclose(held["qmap1"], dynamic_map.values(signed=True), rtol=1e-4)
    assert torch.allclose(held["qmap2"], dynamic_map.values(signed=False), rtol=1e-4)
    assert torch.allclose(held["absmax1"], states.m_scale, rtol=1e-3)
    assert (ours - wide).norm() <= (theirs.detach() - wide).norm()
