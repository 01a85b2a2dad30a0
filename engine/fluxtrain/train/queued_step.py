"""Hold a step whose work is queued on the device, until its numbers are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fluxtrain.trace.step_clock import StepClock
from fluxtrain.updates.loss_scale import LEAST
from fluxtrain.updates.norm import GradNorm


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The numbers of a step: its mean loss, and its gradient norm before clipping."""

    loss: float
    norm: float
    loss_scale: float | None = None  # of fp16
    overflowed: bool = False  # the gradients, at this scale

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite; if not, the weights must not be updated."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def left_out(self) -> bool:
        """Return whether the step failed for its loss scale alone; the next one, at half the scale,
        may succeed."""
        return self.overflowed and self.loss_scale is not None and self.loss_scale > LEAST


@dataclass(frozen=True, kw_only=True)
class QueuedStep:
    """A step whose forward, backward and update are queued; `read` waits for its numbers."""

    number: int  # of the step, from 1
    tokens: int
    epoch: float
    learning_rate: float
    in_backward: bool  # updated in the backward pass
    norm: GradNorm  # read together with the losses
    clock: StepClock

    def read(self) -> Computed:
        """Wait for the backward pass; the batches' losses add up to the mean loss of the step."""
        return Computed(
            loss=math.fsum(self.norm.losses()),
            norm=self.norm.value(),
            loss_scale=self.norm.loss_scale(),
            overflowed=self.norm.overflowed(),
        )
