"""The oracle: an exact split of fp32, torch's AdamW within 1e-6 a step, roots correctly rounded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fluxtrain.core.adamw import fp32, reference
from fluxtrain.core.adamw.fp32 import rounded_sqrt
from fluxtrain.core.adamw.hyper import Hyper, coefficients
from fluxtrain.core.adamw.reference import decode, encode

BIT_PATTERNS = st.integers(min_value=0, max_value=2**32 - 1)


def floats_of(*patterns: int) -> Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32).copy())


def patterns_of(x: Tensor) -> list[int]:
    return [int(bits) for bits in x.numpy().view(np.uint32).reshape(-1)]


def every_kind_of_float(count: int = 1 << 20) -> Tensor:
    """Evenly spread bit patterns: all exponents, both signs, NaNs, subnormals."""
    return floats_of(*range(0, 2**32, 2**32 // count))


@given(BIT_PATTERNS)
def test_a_master_survives_the_split(pattern: int) -> None:
    master = floats_of(pattern)
    hi, lo = encode(master)
    back = decode(hi, lo)
    if math.isnan(float(master)):
        assert math.isnan(float(back))
        assert math.isnan(float(hi)), "the device would compute with a finite weight"
    elif pattern & 0x7FFFFFFF < 0x8000:
        assert patterns_of(back) == [pattern & 0x80000000], "below 2**-134 a master is zero"
    else:
        assert patterns_of(back) == [pattern]


@given(BIT_PATTERNS)
def test_hi_is_the_nearest_bf16_with_ties_away_from_zero(pattern: int) -> None:
    master = floats_of(pattern)
    hi, _ = encode(master)
    tie = pattern & 0xFFFF == 0x8000
    if math.isfinite(float(master)) and not tie:
        assert torch.equal(hi, master.to(torch.bfloat16))
    elif math.isfinite(float(master)):
        assert abs(float(hi)) > abs(float(master))


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("stale", [-32768, -1, 0, 1, 32767])
def test_a_weight_zeroed_from_outside_is_zero_whatever_lo_holds(zero: float, stale: int) -> None:
    hi = torch.tensor([zero], dtype=torch.bfloat16)
    back = decode(hi, torch.tensor([stale], dtype=torch.int16))
    assert float(back) == 0.0
    assert math.copysign(1.0, float(back)) == math.copysign(1.0, zero)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFF])
def test_decoding_is_the_documented_formula_for_every_hi(low: int) -> None:
    high = np.arange(1 << 16, dtype=np.int64)
    bits = np.where(high & 0x7FFF == 0, high << 16, ((high - (low >> 15)) << 16) | low)
    hi = torch.from_numpy(high.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    lo = torch.from_numpy(np.full(1 << 16, low, dtype=np.uint16).view(np.int16))
    assert patterns_of(decode(hi, lo)) == bits.tolist()


def test_bf16_weights_have_no_low_half() -> None:
    weights = torch.randn(1000).bfloat16()
    hi, lo = encode(weights.float())
    assert torch.equal(hi, weights)
    assert not lo.any()


def test_square_roots_are_correctly_rounded() -> None:
    values = every_kind_of_float().abs()
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.sqrt(values.numpy()))
    finite = ~torch.isnan(values)
    assert torch.equal(rounded_sqrt(values)[finite], expected[finite])


def test_nan_results_have_one_bit_pattern() -> None:
    x = floats_of(0x7F800001, 0xFFFFFFFF, 0xFFC00000, 0x3F800000, 0x7F800000)
    quiet_nan = 0x7FC00000
    expected = [quiet_nan, quiet_nan, quiet_nan, 0x3F800000, 0x7F800000]
    assert patterns_of(fp32.quiet(x)) == expected


HYPERS = [
    Hyper(lr=1e-3),
    Hyper(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    Hyper(lr=3e-4, weight_decay=0.0),
    Hyper(lr=1e-3, betas=(0.0, 0.9)),
    Hyper(lr=1e-3, maximize=True),
]


def torch_adamw(p: torch.nn.Parameter, hyper: Hyper) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p],
        lr=hyper.lr,
        betas=hyper.betas,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        maximize=hyper.maximize,
        foreach=False,
        fused=False,
    )


def gradient(n: int, step: int) -> Tensor:
    """A bf16 gradient of many magnitudes, none of them a true zero."""
    generator = torch.Generator().manual_seed(step)
    scale = 10 ** (torch.rand(n, generator=generator) * 8 - 7)
    return (torch.randn(n, generator=generator) * scale).bfloat16()


@pytest.mark.parametrize("hyper", HYPERS)
def test_each_step_is_torchs_within_a_millionth(hyper: Hyper) -> None:
    """Every step starts from torch's own state, so that each step's own error is seen."""
    n, scale = 4096, 0.37
    p = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.05)
    optimizer = torch_adamw(p, hyper)
    state = (p.detach().clone(), torch.zeros(n), torch.zeros(n))
    for step in range(1, 31):
        grad = gradient(n, step)
        p.grad = grad.float() * scale
        before = state[0]
        optimizer.step()
        ours = reference.adamw(*state, grad, coefficients(hyper, step, scale))
        theirs = optimizer.state[p]
        state = (p.detach().clone(), theirs["exp_avg"].clone(), theirs["exp_avg_sq"].clone())
        moved = torch.maximum((state[0] - before).abs(), state[0].abs())
        assert ((ours[0] - state[0]).abs() <= 1e-6 * moved).all()
        assert ((ours[2] - state[2]).abs() <= 1e-6 * state[2]).all()
