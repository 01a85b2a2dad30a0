"""Limits how often something is done: a few times at once, and then so many times a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """Turns to take: `burst` of them at first, and `per_s` new ones a second up to `burst`."""

    def __init__(
        self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._turns, self._counted_s = float(burst), clock()

    def take(self) -> bool:
        """Take a turn; return whether there was one."""
        if self.wait_s() > 0:
            return False
        self._turns -= 1
        return True

    def wait_s(self) -> float:
        """Return the seconds until the next turn; 0 where there is one."""
        now_s = self._clock()
        grown = max(0.0, now_s - self._counted_s) * self._per_s
        self._turns, self._counted_s = min(self._burst, self._turns + grown), now_s
        return 0.0 if self._turns >= 1 else (1 - self._turns) / self._per_s
