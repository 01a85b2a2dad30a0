"""The dynamic loss scale of fp16 training, as torch.amp.GradScaler documents it.

fp16 has no numbers below 6e-8, where many gradients are, so the loss is multiplied before the
backward pass and the update divides by the same factor. The scale doubles after 2000 steps without
an overflow; an overflow halves it, and that step is skipped. The scale is kept and changed on the
device, because the next step is queued before the host has read the outcome of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.memory.segment import Member
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import BadInput

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
LEAST = 1.0  # gradients that overflow unscaled are too large themselves
_MOST = 2.0**40


class LossScale:
    """The factor of the loss; every step may change it."""

    def __init__(
        self, device: torch.device, first: float = FIRST, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self.value = torch.full((), first, dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # since the last change
        self._interval = growth_interval
        self._stepped: tuple[GradNorm, Sequence[Member]] | None = None  # may have been skipped

    def of(self, loss: Tensor) -> Tensor:
        """Return the scaled loss to call `backward` on."""
        return loss * self.value

    def after(self, norm: GradNorm, stepped: Sequence[Member]) -> None:
        """Adapt the scale after a step by `norm` was queued; it counted up members `stepped`."""
        fine = norm.all_finite()
        good = torch.where(fine, self._good + 1, 0)
        grows = good >= self._interval
        larger = torch.clamp(self.value * GROWTH, max=_MOST)
        self.value = torch.where(
            fine, torch.where(grows, larger, self.value), self.value * BACKOFF
        ).clamp(min=LEAST)
        self._good = torch.where(grows, 0, good).to(torch.int32)
        self._stepped = norm, stepped

    def take_back_skipped(self) -> None:
        """Take back the step count of a skipped step. Waits for its norm, so call it before the
        next step counts and before a step count is read."""
        stepped, self._stepped = self._stepped, None
        if stepped is not None and stepped[0].overflowed():
            for member in stepped[1]:
                member.step -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; waits for the device."""
        return {"scale": float(self.value), "good_steps": int(self._good)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Raises BadInput for anything else."""
        try:
            scale, good = float(state["scale"]), int(state["good_steps"])
            if not (LEAST <= scale <= _MOST and good >= 0):
                raise ValueError
        except (KeyError, OverflowError, TypeError, ValueError):
            raise BadInput(f"the loss scale {state!r} of a checkpoint cannot be read") from None
        self.value = torch.full_like(self.value, scale)
        self._good = torch.full_like(self._good, good)
        self._stepped = None
