"""A step whose work is queued on the device and whose numbers have not been read yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fluxtrain.trace.step_clock import StepClock
from fluxtrain.updates.loss_scale import LEAST
from fluxtrain.updates.norm import GradNorm


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The numbers of a step: the mean loss, and the norm before clipping."""

    loss: float
    norm: float
    loss_scale: float | None = None  # of fp16
    overflowed: bool = False  # its gradients did, at this scale

    @property
    def is_finite(self) -> bool:
        """False where the step must not be made."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def left_out(self) -> bool:
        """Was it left out for its scale alone, so that the next, at half of it, may go well?"""
        return self.overflowed and self.loss_scale is not None and self.loss_scale > LEAST


@dataclass(frozen=True, kw_only=True)
class QueuedStep:
    """Forward, backward and update are queued; `read` waits for the numbers."""

    number: int  # of the step, from 1
    tokens: int
    epoch: float
    learning_rate: float
    in_backward: bool  # updated as gradients arrived
    norm: GradNorm  # travels with the losses
    clock: StepClock

    def read(self) -> Computed:
        """Wait for the backward pass; the losses of the batches add up to the mean of the step."""
        return Computed(
            loss=math.fsum(self.norm.losses()),
            norm=self.norm.value(),
            loss_scale=self.norm.loss_scale(),
            overflowed=self.norm.overflowed(),
        )
