"""Clipping by the global gradient norm, as torch.nn.utils.clip_grad_norm_ defines it."""

from __future__ import annotations

from ctypes import c_float

import torch
from torch import Tensor

_EPS = c_float(1e-6).value


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Return the factor of gradients of global `norm`: max_norm / (norm + 1e-6), at most 1.

    In fp32 with torch's roundings (it multiplies max_norm by a reciprocal), so that clipping gives
    torch's bits. NaN stays NaN; max_norm None never clips.
    """
    if max_norm is None:
        return 1.0
    reciprocal = c_float(1.0 / c_float(c_float(norm).value + _EPS).value).value
    scale = c_float(reciprocal * c_float(max_norm).value).value
    return 1.0 if scale > 1.0 else scale


def clip_scale_on_device(norm: Tensor, max_norm: float) -> Tensor:
    """Compute `clip_scale` of an fp32 scalar on its device, with the same roundings. Dividing
    `max_norm` by the norm would round once instead of twice: equal for powers of two alone."""
    return torch.clamp(torch.reciprocal(norm + _EPS) * max_norm, max=1.0)
