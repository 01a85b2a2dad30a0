"""The progress of a run: the part of a checkpoint that is neither tensors nor cursors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

LOSS_TAIL = 200


@dataclass
class RunState:
    """Counters and losses; `step` counts optimizer steps, those included that were skipped
    because fp16 gradients overflowed."""

    step: int = 0
    total_tokens: int = 0
    first_loss: float | None = None
    losses: list[float] = field(default_factory=list)  # the last LOSS_TAIL steps
    evaluation_loss: float | None = None
    evaluated_step: int | None = None
    trained_s: float = 0.0  # over all processes of the run
    best_loss: float | None = None  # the lowest held-out loss so far, and the step it was after
    best_step: int | None = None
    improved_loss: float | None = None  # the last one that counted as an improvement
    stale_evaluations: int = 0  # since then
    skipped: int = 0  # steps whose loss or gradients were not finite
    skipped_in_a_row: int = 0  # of these, at the end
    skipped_from: str | None = None  # what was the first in that row that is not finite
    held_out: str | None = None  # the fingerprint of what evaluations are of
    changed: list[str] = field(default_factory=list)  # what resumes set anew, and from which step

    def evaluates(self, held_out: str | None) -> bool:
        """Note the fingerprint of the rows for the next evaluations; return whether they differ
        from the earlier ones, which then can no longer be the best."""
        before, self.held_out = self.held_out, held_out
        if before in (None, held_out) or self.best_loss is None:
            return False
        self.best_loss = self.best_step = self.improved_loss = None
        self.stale_evaluations = 0
        return True

    def step_done(self, loss: float, tokens: int, seconds: float) -> None:
        """Count one more optimizer step; a loss that is not finite is not kept."""
        self.step += 1
        self.total_tokens += tokens
        self.trained_s += seconds
        if not math.isfinite(loss):
            return
        self.losses = [*self.losses[-LOSS_TAIL + 1 :], loss]
        if self.first_loss is None:
            self.first_loss = loss

    def evaluated(self, loss: float, threshold: float = 0.0) -> None:
        """Note the held-out loss at this step.

        It is an improvement where it lies more than `threshold` below the last one that was. A loss
        that is not finite is neither an improvement nor the best, and no checkpoint can hold it.
        """
        self.evaluation_loss, self.evaluated_step = None, self.step
        self.stale_evaluations += 1
        if not math.isfinite(loss):
            return
        self.evaluation_loss = loss
        if self.improved_loss is None or loss < self.improved_loss - threshold:
            self.improved_loss, self.stale_evaluations = loss, 0
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, self.step

    @property
    def last_loss(self) -> float | None:
        return self.losses[-1] if self.losses else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; floats survive JSON exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RunState:
        """Read the result of `to_json`."""
        return msgspec.convert(content, cls)
