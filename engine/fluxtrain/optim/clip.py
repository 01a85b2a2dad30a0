"""Clipping by the global gradient norm, as torch.nn.utils.clip_grad_norm_ defines it."""

from __future__ import annotations

from ctypes import c_float

_EPS = c_float(1e-6).value


def clip_scale(norm: float, max_norm: float | None) -> float:
    """What gradients of global `norm` are multiplied by: max_norm / (norm + 1e-6), at most 1.

    In fp32, as torch computes it from an fp32 norm. NaN stays NaN; max_norm None never clips.
    """
    if max_norm is None:
        return 1.0
    shifted = c_float(c_float(norm).value + _EPS).value
    if shifted == 0.0:
        return 1.0
    scale = c_float(c_float(max_norm).value / shifted).value
    return 1.0 if scale > 1.0 else scale
