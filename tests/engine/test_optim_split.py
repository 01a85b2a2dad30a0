"""The native update, the device update and the oracle give the same bits."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fluxtrain import _native
from fluxtrain.optim import reference
from fluxtrain.optim.hyper import Hyper, coefficients
from fluxtrain.optim.split_adamw import (
    accumulate_,
    decode,
    encode,
    sum_squares,
    update_,
    update_by_torch_,
    update_f32_,
    update_moments_,
    update_on_device_,
    update_weights_,
    update_weights_f32_,
)
from tests.engine.narrow_states import any_floats

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


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    width = {2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(width), expected.view(width))


@ISAS
@GRADS
@settings(max_examples=25)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**20), wild=st.booleans(), scale=st.floats(0, 2))
def test_the_native_update_has_the_oracles_bits(
    isa: str, grad_dtype: torch.dtype, n: int, seed: int, wild: bool, scale: float
) -> None:
    _native.set_isa(isa)
    training = Training(n, seed, wild)
    for _ in range(3):
        grad = training.next_gradient(grad_dtype, scale)
        update_(*training.state, grad, hyper=HYPER, step=training.step, grad_scale=scale, threads=1)
        training.assert_as_expected()


@ISAS
@GRADS
def test_large_arenas_on_several_threads_have_the_oracles_bits(
    isa: str, grad_dtype: torch.dtype
) -> None:
    _native.set_isa(isa)
    training = Training(300_007, seed=5, wild=True)
    for threads in (1, 2, 5, None):
        grad = training.next_gradient(grad_dtype, 0.5)
        update_(
            *training.state, grad, hyper=HYPER, step=training.step, grad_scale=0.5, threads=threads
        )
        training.assert_as_expected()


@ISAS
@GRADS
@settings(max_examples=25)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**20), wild=st.booleans(), scale=st.floats(0, 2))
def test_the_weights_first_and_the_moments_later_have_the_oracles_bits(
    isa: str, grad_dtype: torch.dtype, n: int, seed: int, wild: bool, scale: float
) -> None:
    _native.set_isa(isa)
    training = Training(n, seed, wild)
    for _ in range(3):
        grad = training.next_gradient(grad_dtype, scale)
        how = {"hyper": HYPER, "step": training.step, "grad_scale": scale}
        moments_before = training.m.clone(), training.v.clone()
        update_weights_(*training.state, grad, **how, threads=1)  # type: ignore[arg-type]
        assert_same_bits(training.m, moments_before[0])
        assert_same_bits(training.v, moments_before[1])
        update_moments_(training.m, training.v, grad, **how, threads=1)  # type: ignore[arg-type]
        training.assert_as_expected()


@ISAS
@GRADS
def test_both_passes_over_large_arenas_on_several_threads_have_the_oracles_bits(
    isa: str, grad_dtype: torch.dtype
) -> None:
    _native.set_isa(isa)
    training = Training(300_007, seed=5, wild=True)
    for threads in (1, 2, 5, None):
        grad = training.next_gradient(grad_dtype, 0.5)
        how = {"hyper": HYPER, "step": training.step, "grad_scale": 0.5, "threads": threads}
        update_weights_(*training.state, grad, **how)  # type: ignore[arg-type]
        m, v = training.m, training.v
        for part in (slice(100_001, None), slice(0, 100_001)):  # in any order, wherever cut
            update_moments_(m[part], v[part], grad[part], **how)  # type: ignore[arg-type]
        training.assert_as_expected()


@ISAS
@pytest.mark.parametrize("wild", [False, True])
def test_both_passes_over_fp32_weights_are_the_update_in_one(isa: str, wild: bool) -> None:
    _native.set_isa(isa)
    p, m, v = (any_floats(4099, seed, wild) for seed in range(3))
    v = v.abs()
    later = [x.clone() for x in (p, m, v)]
    for step in range(1, 4):
        grad = any_floats(4099, 10 + step, wild)
        update_f32_(p, m, v, grad, hyper=HYPER, step=step, grad_scale=0.7)
        update_weights_f32_(*later, grad, hyper=HYPER, step=step, grad_scale=0.7)
        update_moments_(*later[1:], grad, hyper=HYPER, step=step, grad_scale=0.7)
        for one, other in zip((p, m, v), later, strict=True):
            assert_same_bits(one, other)


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
        update_by_torch_(
            *training.state,
            grad,
            hyper=HYPER,
            step=training.step,
            grad_scale=0.3,
            slice_elements=slice_elements,
        )
        training.assert_as_expected()


def test_a_scale_that_never_leaves_the_device_gives_the_same_bits() -> None:
    by_number, by_tensor = Training(1000, seed=3), Training(1000, seed=3)
    scale = torch.tensor(0.3)
    grad = by_number.next_gradient(torch.bfloat16, 0.3)
    hyper = Hyper(lr=1e-2, maximize=True)
    update_by_torch_(*by_number.state, grad, hyper=hyper, step=1, grad_scale=float(scale))
    update_by_torch_(*by_tensor.state, grad, hyper=hyper, step=1, grad_scale=scale)
    for one, other in zip(by_number.state, by_tensor.state, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("scale", [0.3, torch.tensor(0.3)])
def test_a_device_that_is_the_host_gives_the_same_bits(scale: float | Tensor) -> None:
    resident = Training(1000, seed=6)
    grad = resident.next_gradient(torch.bfloat16, 0.3)
    update_on_device_(*resident.state, grad, hyper=HYPER, step=1, grad_scale=scale)
    resident.assert_as_expected()
    p, m, v = (any_floats(1000, seed, wild=True) for seed in (1, 2, 3))
    copies = [x.clone() for x in (p, m, v)]
    update_on_device_(p, None, m, v, grad.float(), hyper=HYPER, step=1, grad_scale=scale)
    update_by_torch_(
        copies[0], None, *copies[1:], grad.float(), hyper=HYPER, step=1, grad_scale=scale
    )
    for one, other in zip((p, m, v), copies, strict=True):
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
        update_f32_(*native, grad, hyper=HYPER, step=step, grad_scale=0.5)
        p, m, v = on_device
        update_by_torch_(p, None, m, v, grad, hyper=HYPER, step=step, grad_scale=0.5)
        for got, device, want in zip(native, on_device, expected, strict=True):
            assert_same_bits(got, want)
            assert_same_bits(device, want)


@given(cut=st.integers(0, 1000))
def test_an_arena_may_be_cut_anywhere(cut: int) -> None:
    whole, parts = Training(1000, seed=4, wild=True), Training(1000, seed=4, wild=True)
    grad = whole.next_gradient(torch.bfloat16, 1.0)
    update_(*whole.state, grad, hyper=HYPER, step=1)
    for part in (slice(0, cut), slice(cut, 1000)):
        update_(*(x[part] for x in parts.state), grad[part], hyper=HYPER, step=1)
    for one, other in zip(whole.state, parts.state, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_are_kept_whatever_the_process_chose(flush: bool) -> None:
    p, m, v = torch.tensor([1.0]), torch.tensor([1e-40]), torch.tensor([1e-40])
    expected = reference.adamw(p, m, v, torch.zeros(1), coefficients(HYPER, 5))
    assert float(expected[1]) != 0.0
    try:
        torch.set_flush_denormal(flush)
        update_f32_(p, m, v, torch.zeros(1), hyper=HYPER, step=5)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(m, expected[1])


def test_a_zero_scale_still_decays_the_weights() -> None:
    hi, lo = encode(torch.ones(64))
    m, v = torch.zeros(64), torch.zeros(64)
    update_(hi, lo, m, v, torch.ones(64), hyper=HYPER, step=1, grad_scale=0.0)
    assert torch.allclose(decode(hi, lo), torch.full((64,), 1 - HYPER.lr * HYPER.weight_decay))


def test_other_threads_run_while_an_update_does() -> None:
    """The GIL is free: a Python thread counts on while one long native call runs. On a machine with
    other work it may not come to that in every call."""
    n = 20_000_000
    hi, lo = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int16)
    m, v, grad = torch.zeros(n), torch.zeros(n), torch.ones(n, dtype=torch.bfloat16)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    meanwhile: list[int] = []
    while not meanwhile or (max(meanwhile) < 2 and len(meanwhile) < 50):
        start = time.perf_counter()
        update_(hi, lo, m, v, grad, hyper=HYPER, step=1, threads=1)
        end = time.perf_counter()
        meanwhile.append(sum(start < at < end for at in ticks))
    done.set()
    ticker.join()
    assert max(meanwhile) >= 2


@ISAS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulation_is_torchs_addition(isa: str, dtype: torch.dtype) -> None:
    _native.set_isa(isa)
    total, x = torch.randn(70_003), torch.randn(70_003).to(dtype)
    expected = total + x.float()
    accumulate_(total, x, threads=2)
    assert_same_bits(total, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_squares_is_exact_to_double_and_the_same_on_any_thread_count(
    dtype: torch.dtype,
) -> None:
    x = (torch.randn(100_001) * 3).to(dtype)
    sums = set()
    for isa in _native.ISA_NAMES:
        _native.set_isa(isa)
        sums |= {sum_squares(x, threads=threads) for threads in (1, 2, 3, 8)}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(float(x.double().square().sum()), rel=1e-12)


def test_nothing_to_do_is_done() -> None:
    none = torch.zeros(0)
    state = (none.bfloat16(), none.to(torch.int16), none.clone(), none.clone())
    update_(*state, none, hyper=HYPER, step=1)
    assert sum_squares(none) == 0.0


@pytest.mark.parametrize(
    ("position", "wrong", "error"),
    [
        (0, torch.zeros(8), TypeError),
        (2, torch.zeros(8, dtype=torch.float64), TypeError),
        (4, torch.zeros(8, dtype=torch.float16), TypeError),
        (3, torch.zeros(9), ValueError),
        (4, torch.zeros(16)[::2], ValueError),
        (4, torch.zeros(8, device="meta"), ValueError),
    ],
)
def test_tensors_that_would_corrupt_memory_are_refused(
    position: int, wrong: Tensor, error: type[Exception]
) -> None:
    tensors = [*encode(torch.zeros(8)), torch.zeros(8), torch.zeros(8), torch.zeros(8)]
    tensors[position] = wrong
    with pytest.raises(error, match=("hi", "lo", "m", "v", "grad")[position]):
        update_(*tensors, hyper=HYPER, step=1)
