"""Estimates how long the rest takes, from the steps of this process, with a spread."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, pvariance

RECENT_STEPS = 50
_WARM_UP_STEPS = 1  # the first step of a process builds caches and probes; it predicts nothing


class Progress:
    """Recent step times of this process; a resumed run starts with none."""

    def __init__(self, recent_steps: int = RECENT_STEPS) -> None:
        self._recent_s: deque[float] = deque(maxlen=recent_steps)
        self._seen = 0

    def step_took(self, seconds: float) -> None:
        """Note a step's time, including evaluation and saving since the previous step."""
        self._seen += 1
        if self._seen > _WARM_UP_STEPS:
            self._recent_s.append(seconds)

    def eta(self, remaining_steps: int) -> tuple[float | None, float | None]:
        """Return the seconds left and their standard deviation; None before two steps are known.

        The sum of `n` steps with variance v, whose mean is known from k steps, varies by
        n v + n^2 v / k.
        """
        if remaining_steps == 0:
            return 0.0, 0.0
        known = len(self._recent_s)
        if known < 2:
            return None, None
        variance = pvariance(self._recent_s)
        spread = math.sqrt(remaining_steps * variance + remaining_steps**2 * variance / known)
        return remaining_steps * fmean(self._recent_s), spread
