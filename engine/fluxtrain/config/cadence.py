"""How often what interrupts the steps is done: every so many, or as often as it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

AUTO_PARTS = 10  # `auto` is this many times in a run


@dataclass(kw_only=True)
class Cadence:
    """When the next evaluation or checkpoint is due.

    `auto` is a tenth of the run, sooner after `period_s`, and later when it would take more than
    `share` of the time. `end` and every other rule include the last step.
    """

    every: int | Literal["auto", "end"]
    total_steps: int
    share: float
    period_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    last_step: int = 0
    _last_s: float = field(init=False)
    _cost_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._last_s = self.clock()

    @property
    def auto_steps(self) -> int:
        """Return the interval that `auto` means when the cost does not matter."""
        return max(1, -(-self.total_steps // AUTO_PARTS))

    def is_due(self, step: int) -> bool:
        """Return whether the event is due after `step`."""
        if step >= self.total_steps:
            return True
        if self.every == "end":
            return False
        if self.every != "auto":
            return step % self.every == 0
        since_s = self.clock() - self._last_s
        if since_s < self._cost_s / self.share:
            return False
        overdue = self.period_s is not None and since_s >= self.period_s
        return overdue or step - self.last_step >= self.auto_steps

    def nears(self, step: int) -> bool:
        """Return whether the next event before the run's end is near: half of the way has passed,
        or is unknown."""
        if self.every == "end" or step >= self.total_steps:
            return False
        if self.every != "auto":
            return (step // self.every + 1) * self.every < self.total_steps
        half_s = None if self.period_s is None else self.period_s / 2
        overdue = half_s is not None and self.clock() - self._last_s >= half_s
        return overdue or 2 * (step - self.last_step) >= self.auto_steps

    def also_took(self, cost_s: float) -> None:
        """Add to the cost of the last event."""
        self._cost_s += cost_s
        self._last_s = self.clock()

    def done(self, step: int, cost_s: float) -> None:
        """Note that the event happened after `step` and cost `cost_s`."""
        self.last_step, self._cost_s, self._last_s = step, cost_s, self.clock()
