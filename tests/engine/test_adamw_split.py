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
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper, coefficients
from fluxtrain.core.adamw.kernels import step_, step_by_torch_
from fluxtrain.core.adamw.reference import decode, encode
from tests.engine.low_bit_states import any_floats

pytestmark = pytest.mark.usefixtures("isa_put_back")
ISAS = pytest.mark.parametrize("isa", _native.ISA_NAMES)
GRADS = pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
HYPER = Hyper(lr=1e-2, weight_decay=0.1)


class Training:
    """The same weights trained by the oracle and by what is under test."""

    def __init__(self, n: int, seed: int, wild: bool = False) -> None:
        self.n, self.seed, self.wild, self.step = n, seed, wild, 0
        self.hi, self.lo = encode(any_floats(n, seed, wild))
        self.m = any_floats(n, seed + 1, wild)
        self.v = any_floats(n, seed + 2, wild).square()
        self.expected = (decode(self.hi, self.lo), self.m.clone(), self.v.clone())

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.hi, self.lo, self.m, self.v

    def flat(self, grad: Tensor) -> Flat:
        return Flat(weights=self.hi, lo=self.lo, m=self.m, v=self.v, gradient=grad)

    def take(
        self,
        grad: Tensor,
        scale: float = 1.0,
        *,
        part: Pass = Pass.UPDATE,
        threads: int | None = None,
    ) -> None:
        """Its step of now, by the native kernels."""
        step_(self.flat(grad), now(self.step, scale), part=part, threads=threads)

    def next_gradient(self, dtype: torch.dtype, scale: float) -> Tensor:
        """The gradient of the next step, which the oracle has already taken."""
        self.step += 1
        grad = any_floats(self.n, self.seed + 10 + self.step, self.wild).to(dtype)
        master, m, v = self.expected
        master = decode(*encode(master))  # what is kept between steps
        self.expected = reference.adamw(master, m, v, grad, coefficients(HYPER, self.step, scale))
        return grad

    def assert_as_expected(self) -> None:
        hi, lo = encode(self.expected[0])
        assert_same_bits(self.hi, hi)
        assert_same_bits(self.lo, lo)
        assert_same_bits(self.m, self.expected[1])
        assert_same_bits(self.v, self.expected[2])


def now(step: int, scale: float = 1.0) -> AdamWUpdate:
    return AdamWUpdate(hyper=HYPER, step=step, scale=scale)


def fp32_flat(p: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> Flat:
    return Flat(weights=p, m=m, v=v, gradient=grad)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    width = {2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(width), expected.view(width))


@ISAS
@GRADS
@pytest.mark.parametrize("deferred", [False, True])
@settings(max_examples=25)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**20), wild=st.booleans(), scale=st.floats(0, 2))
def test_the_native_update_has_the_oracles_bits(
    isa: str, grad_dtype: torch.dtype, deferred: bool, n: int, seed: int, wild: bool, scale: float
) -> None:
    _native.set_isa(isa)
    training = Training(n, seed, wild)
    for _ in range(3):
        grad = training.next_gradient(grad_dtype, scale)
        if deferred:
            moments_before = training.m.clone(), training.v.clone()
            training.take(grad, scale, part=Pass.WEIGHTS, threads=1)
            assert_same_bits(training.m, moments_before[0])
            assert_same_bits(training.v, moments_before[1])
            training.take(grad, scale, part=Pass.MOMENTS, threads=1)
        else:
            training.take(grad, scale, threads=1)
        training.assert_as_expected()


def test_the_oracles_two_passes_are_its_update_in_one() -> None:
    master, m, v, grad = (any_floats(2000, seed, wild=True) for seed in range(4))
    c = coefficients(HYPER, 3, 0.5)
    expected = reference.adamw(master, m, v, grad, c)
    assert_same_bits(reference.adamw_weights(master, m, v, grad, c), expected[0])
    for got, wanted in zip(reference.adamw_moments(m, v, grad, c), expected[1:], strict=True):
        assert_same_bits(got, wanted)


@GRADS
@pytest.mark.parametrize("slice_elements", [7, 1000, 1 << 22])
def test_the_update_by_torch_has_the_oracles_bits(
    grad_dtype: torch.dtype, slice_elements: int
) -> None:
    training = Training(5000, seed=9, wild=True)
    for _ in range(3):
        grad = training.next_gradient(grad_dtype, 0.3)
        update = now(training.step, 0.3)
        step_by_torch_(training.flat(grad), update, slice_elements=slice_elements)
        training.assert_as_expected()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_clip_of_the_device_counts_as_part_of_the_scale(backend: Any) -> None:
    clipped = Training(1000, seed=3)
    grad = clipped.next_gradient(torch.bfloat16, 0.25)
    update = AdamWUpdate(hyper=HYPER, step=1, scale=0.5, clip=torch.tensor(0.5))
    step_(clipped.flat(grad), update, backend=backend)
    clipped.assert_as_expected()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_clip_that_is_not_finite_leaves_everything_as_it_is(backend: Any) -> None:
    training = Training(1000, seed=6)
    before = [x.clone() for x in training.state]
    update = AdamWUpdate(hyper=HYPER, step=1, clip=torch.tensor(torch.nan))
    step_(training.flat(torch.ones(1000)), update, backend=backend)
    for one, other in zip(training.state, before, strict=True):
        assert_same_bits(one, other)


@ISAS
def test_fp32_weights_have_the_oracles_bits(isa: str) -> None:
    _native.set_isa(isa)
    native = [any_floats(1003, seed, wild=True) for seed in (1, 2, 3)]
    on_device = [x.clone() for x in native]
    expected = tuple(x.clone() for x in native)
    for step in range(1, 4):
        grad = any_floats(1003, 50 + step, wild=True)
        expected = reference.adamw(*expected, grad, coefficients(HYPER, step, 0.5))
        step_(fp32_flat(*native, grad), now(step, 0.5))
        step_(fp32_flat(*on_device, grad), now(step, 0.5), backend="torch")
        for got, device, want in zip(native, on_device, expected, strict=True):
            assert_same_bits(got, want)
            assert_same_bits(device, want)


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
    assert_same_bits(m, expected[1])


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
    flat = Training(8, seed=1).flat(torch.zeros(8))
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
