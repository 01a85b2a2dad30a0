"""AdamW's hyperparameters and the fp32 coefficients of one step, shared by every implementation."""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fluxtrain.errors import BadInput


@dataclass(frozen=True)
class Hyper:
    """AdamW as torch.optim.AdamW names it. `maximize` follows the gradient instead of opposing it.

    Raises BadInput for values that torch.optim.AdamW refuses.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    def __post_init__(self) -> None:
        if not self.lr >= 0.0:
            raise BadInput(f"AdamW's lr is {self.lr}: it must be 0 or more")
        if not self.eps >= 0.0:
            raise BadInput(f"AdamW's eps is {self.eps}: it must be 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise BadInput(f"AdamW's betas are {self.betas}: both must be in [0, 1)")
        if not self.weight_decay >= 0.0:
            raise BadInput(f"AdamW's weight_decay is {self.weight_decay}: it must be 0 or more")


class Coefficients(NamedTuple):
    """The factors of one step, each computed in double and rounded to fp32 once.

    The order and the meaning are those of `flux_adamw_step` in native/include/flux_native.h.
    """

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    rsqrt_correction2: float
    eps: float


class LowBitCoefficients(NamedTuple):
    """The factors of an update with 8-bit or bf16 states, each rounded to fp32 once more."""

    of_m: float  # times the gradient: added to m
    of_v: float  # times the gradient, squared: added to v
    minus_step: float
    eps: float


@dataclass(frozen=True, kw_only=True)
class AdamWUpdate:
    """One step of a range: hyperparameters, its number, and factors of the gradients."""

    hyper: Hyper
    step: int  # counts from 1
    scale: float = 1.0  # factor of the gradients
    clip: Tensor | None = None  # another one: 0-d fp32 on the device; NaN changes nothing

    def coefficients(self) -> Coefficients:
        """Return the fp32 coefficients of the step, without `clip`."""
        return coefficients(self.hyper, self.step, self.scale)


def coefficients(hyper: Hyper, step: int, grad_scale: float = 1.0) -> Coefficients:
    """Return the coefficients of step `step` (from 1), gradients multiplied by `grad_scale`."""
    if step < 1:
        raise BadInput(f"AdamW's steps count from 1, not {step}: its bias corrections divide by 0")
    beta1, beta2 = hyper.betas
    exact = Coefficients(
        grad_scale=-grad_scale if hyper.maximize else grad_scale,
        decay=1.0 - hyper.lr * hyper.weight_decay,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        step_size=hyper.lr / (1.0 - beta1**step),
        rsqrt_correction2=1.0 / math.sqrt(1.0 - beta2**step),
        eps=hyper.eps,
    )
    return Coefficients(*(c_float(value).value for value in exact))


def low_bit_coefficients(c: Coefficients) -> LowBitCoefficients:
    """Return the coefficients of a step with 8-bit or bf16 states, which has fewer operations."""
    exact = (
        c.one_minus_beta1 * c.grad_scale,
        c_float(math.sqrt(c.one_minus_beta2)).value * c.grad_scale,
        -(c.step_size / c.rsqrt_correction2),
        c.eps / c.rsqrt_correction2,
    )
    return LowBitCoefficients(*(c_float(value).value for value in exact))
