"""One AdamW step of a range of weights, whatever the format of its states and wherever it lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.optim.fused_device import update_resident_
from fluxtrain.optim.fused_narrow import update8_resident_, update16_resident_
from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.narrow_adamw import update8_, update16_
from fluxtrain.optim.reference import Rounding, States8
from fluxtrain.optim.split_adamw import update_, update_f32_


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Flat tensors of one length (scales: one element for each 256)."""

    weights: Tensor  # bfloat16 with `lo`, or float32
    lo: Tensor | None  # int16
    m: Tensor  # float32, bfloat16, or uint8 codes with scales
    v: Tensor
    m_scale: Tensor | None
    v_scale: Tensor | None
    gradient: Tensor
    rounding: Rounding  # of bfloat16 moments

    @property
    def states8(self) -> States8 | None:
        """The states where they are of 8 bits."""
        if self.m_scale is None or self.v_scale is None:
            return None
        return States8(self.m, self.v, self.m_scale, self.v_scale)


def step_on_host_(flat: Flat, *, hyper: Hyper, step: int, scale: float) -> None:
    """In place by the native kernels; gradients count times `scale`."""
    f, states8 = flat, flat.states8
    if states8 is not None:
        update8_(f.weights, f.lo, states8, f.gradient, hyper=hyper, step=step, grad_scale=scale)
    elif f.m.dtype is torch.bfloat16:
        update16_(
            f.weights, f.lo, f.m, f.v, f.gradient, f.rounding,
            hyper=hyper, step=step, grad_scale=scale,
        )  # fmt: skip
    elif f.lo is None:
        update_f32_(f.weights, f.m, f.v, f.gradient, hyper=hyper, step=step, grad_scale=scale)
    else:
        update_(f.weights, f.lo, f.m, f.v, f.gradient, hyper=hyper, step=step, grad_scale=scale)


def step_on_device_(flat: Flat, *, hyper: Hyper, step: int, scale: float, clip: Tensor) -> None:
    """In place where the tensors are, with the bits of `step_on_host_`; gradients count times
    `scale` and `clip` (0-d fp32 on the device; NaN leaves everything as it is)."""
    f, states8 = flat, flat.states8
    if f.m.dtype is torch.float32:
        update_resident_(
            f.weights, f.lo, f.m, f.v, f.gradient, hyper=hyper, step=step, scale=scale, clip=clip
        )
        return
    if not f.weights.is_cuda:
        if bool(torch.isfinite(clip)):
            step_on_host_(flat, hyper=hyper, step=step, scale=float(clip) * scale)
    elif states8 is not None:
        update8_resident_(
            f.weights, f.lo, states8, f.gradient, hyper=hyper, step=step, scale=scale, clip=clip
        )
    else:
        update16_resident_(
            f.weights, f.lo, f.m, f.v, f.gradient, f.rounding,
            hyper=hyper, step=step, scale=scale, clip=clip,
        )  # fmt: skip
