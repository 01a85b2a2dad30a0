"""How long a block may be timed before a training: kernels that are tuned first take minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

from fluxtrain.calibration.small_model import NotCalibrated
from fluxtrain.units import duration_text

LIMIT_S = 20.0
SHARE = 0.1  # of the run, where that is longer


class Patience:
    """The time since a calibration began, against what it may take."""

    def __init__(
        self, steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """steps: of the run that follows; None: not known."""
        self._steps, self._clock = steps or 0, clock
        self._began_s = clock()

    def check(self, step_s: float) -> None:
        """Raise NotCalibrated where more than the limit has passed; a step of the small model, with
        a part of the run's blocks and rows, takes `step_s`."""
        passed_s = self._clock() - self._began_s
        if passed_s > max(LIMIT_S, SHARE * self._steps * step_s):
            raise NotCalibrated(
                f"timing it took {duration_text(passed_s)} and was not done: kernels were compiled "
                "or tuned first, which the next run finds done"
            )
