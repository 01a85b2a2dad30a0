"""The native update, the device update and the oracle give the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import Pass
from fluxtrain.core.adamw import reference
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, coefficients
from fluxtrain.core.adamw.kernels import step_
from tests.engine.low_bit_states import HYPER, ISAS, LAYOUTS, Held, any_floats, same_bits

pytestmark = pytest.mark.usefixtures("isa_put_back")
KEY = reference.rounding(7, 1, 0)


def now(step: int, scale: float = 1.0) -> AdamWUpdate:
    return AdamWUpdate(hyper=HYPER, step=step, scale=scale)


def fp32_flat(p: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> Flat:
    return Flat(weights=p, m=m, v=v, gradient=grad)


@ISAS
@LAYOUTS
@settings(max_examples=25)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**20), wild=st.booleans(), scale=st.floats(0, 2))
def test_weights_first_and_moments_later_have_the_oracles_bits(
    isa: str, layout: tuple[str, torch.dtype], n: int, seed: int, wild: bool, scale: float
) -> None:
    _native.set_isa(isa)
    got = Held("fp32", layout[0], n, seed, wild)
    expected = got.copy()
    for step in (1, 2, 3):
        grad = any_floats(n, seed + 10 + step, wild).to(layout[1])
        expected.oracle_step(grad, step, scale)
        before = [state.clone() for state in got.states]
        got.step(grad, step, scale, part=Pass.WEIGHTS)
        assert all(map(same_bits, got.states, before))
        got.step(grad, step, scale, part=Pass.MOMENTS)
        assert got.equals(expected)


def test_the_oracles_two_passes_are_its_update_in_one() -> None:
    master, m, v, grad = (any_floats(2000, seed, wild=True) for seed in range(4))
    c = coefficients(HYPER, 3, 0.5)
    expected = reference.adamw(master, m, v, grad, c)
    assert same_bits(reference.adamw_weights(master, m, v, grad, c), expected[0])
    for got, wanted in zip(reference.adamw_moments(m, v, grad, c), expected[1:], strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_clip_of_the_device_counts_as_part_of_the_scale(backend: Any) -> None:
    clipped = Held("fp32", "split", 1000, seed=3)
    expected, grad = clipped.copy(), any_floats(1000, 14, False).bfloat16()
    expected.oracle_step(grad, 1, 0.25)
    update = AdamWUpdate(hyper=HYPER, step=1, scale=0.5, clip=torch.tensor(0.5))
    step_(clipped.flat(grad, KEY), update, backend=backend)
    assert clipped.equals(expected)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_clip_that_is_not_finite_leaves_everything_as_it_is(backend: Any) -> None:
    held = Held("fp32", "split", 1000, seed=6)
    before = held.copy()
    update = AdamWUpdate(hyper=HYPER, step=1, clip=torch.tensor(torch.nan))
    step_(held.flat(torch.ones(1000), KEY), update, backend=backend)
    assert held.equals(before)


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_are_kept_whatever_the_process_chose(flush: bool) -> None:
    p, m, v = torch.tensor([1.0]), torch.tensor([1e-40]), torch.tensor([1e-40])
    expected = reference.adamw(p, m, v, torch.zeros(1), coefficients(HYPER, 5))
    assert float(expected[1]) != 0.0
    try:
        torch.set_flush_denormal(flush)
        step_(fp32_flat(p, m, v, torch.zeros(1)), now(5))
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(m, expected[1])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("m", torch.zeros(8, dtype=torch.float64)),
        ("v", torch.zeros(9)),
        ("gradient", torch.zeros(16)[::2]),
        ("lo", torch.zeros(8, device="meta", dtype=torch.int16)),
    ],
)
def test_tensors_that_would_corrupt_memory_reach_no_kernel(name: str, wrong: Tensor) -> None:
    flat = Held("fp32", "split", 8, seed=1).flat(torch.zeros(8), KEY)
    with pytest.raises(AssertionError, match=name):
        step_(replace(flat, **{name: wrong}), now(1))


def test_the_library_says_why_it_refuses_a_call() -> None:
    args = _native.AdamWArgs(n=8, pass_=_native.Pass.WEIGHTS, state_format=2)
    with pytest.raises(ValueError, match="an array is missing"):
        _native.adamw(args)
    args.n = 0
    with pytest.raises(ValueError, match="no kernel for this combination"):
        _native.adamw(args)
    args.pass_ = 9
    with pytest.raises(ValueError, match="unknown"):
        _native.adamw(args)
    args.size = 8
    with pytest.raises(ValueError, match="another size"):
        _native.adamw(args)
