"""The coefficients of a step are those of the paper, rounded to fp32 once."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest

from fluxtrain._native import AdamWStep
from fluxtrain.core.adamw.hyper import Coefficients, Hyper, coefficients
from fluxtrain.errors import BadInput


def fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@pytest.mark.parametrize("step", [1, 2, 3, 10, 100])
def test_the_bias_corrections_are_exact_to_fp32(step: int) -> None:
    c = coefficients(Hyper(lr=0.25, betas=(0.9, 0.999)), step)
    exact_step_size = Fraction(1, 4) / (1 - Fraction(0.9) ** step)
    exact_correction2 = 1 - Fraction(0.999) ** step
    assert c.step_size == pytest.approx(float(exact_step_size), rel=1e-7)
    assert 1 / c.rsqrt_correction2**2 == pytest.approx(float(exact_correction2), rel=2e-7)


def test_maximize_turns_the_gradient_around_and_nothing_else() -> None:
    down = coefficients(Hyper(), 3, 0.5)
    up = coefficients(Hyper(maximize=True), 3, 0.5)
    assert up == down._replace(grad_scale=-0.5)


def test_the_c_structure_has_the_same_fields_in_the_same_order() -> None:
    names = tuple(name for name, _ in AdamWStep._fields_)
    assert names == Coefficients._fields
    c = coefficients(Hyper(), 7, 0.25)
    step = AdamWStep(*c)
    assert tuple(getattr(step, name) for name in names) == tuple(c)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": -1e-8}, "eps is"),
        ({"betas": (1.0, 0.999)}, "betas are"),
        ({"betas": (0.9, -0.1)}, "betas are"),
        ({"weight_decay": -0.1}, "weight_decay is"),
    ],
)
def test_what_torch_refuses_is_refused(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        Hyper(**wrong)  # type: ignore[arg-type]
