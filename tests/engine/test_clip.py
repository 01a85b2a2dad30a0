"""clip_scale gives the bits of torch's own coefficient."""

from __future__ import annotations

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fluxtrain.core.updates.norm import clip_scale, clip_scale_on_device

NORMS = st.floats(min_value=0, width=32)
LIMITS = st.floats(min_value=0, max_value=1e6, allow_subnormal=False)
LEAST = 2.0**-149  # the least fp32 number above zero


def torch_coefficient(norm: float, max_norm: float) -> float:
    """What torch.nn.utils.clip_grads_with_norm_ multiplies a gradient of 1 by."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, torch.tensor(norm))
    return float(parameter.grad)


@given(NORMS, LIMITS)
def test_the_scale_has_the_bits_of_torchs_coefficient(norm: float, max_norm: float) -> None:
    assert clip_scale(norm, max_norm) == torch_coefficient(norm, max_norm)


@given(NORMS, LIMITS)
@example(1.7, 0.3)
@example(1.1, 0.05)
def test_parts_on_the_device_are_clipped_with_the_same_bits(norm: float, max_norm: float) -> None:
    on_device = clip_scale_on_device(torch.tensor(norm), max_norm)
    assert on_device.dtype == torch.float32
    assert float(on_device) == clip_scale(norm, max_norm)


def test_a_norm_that_is_not_finite_is_seen_in_the_scale() -> None:
    assert math.isnan(clip_scale(math.nan, 1.0))
    assert clip_scale(math.inf, 1.0) == 0.0
