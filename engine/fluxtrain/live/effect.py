"""What a change was worth: the median of steady steps before it against that of those after. Pure.

Steady steps are those that nothing else happened around; whoever feeds this leaves the others out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

STEPS = 20  # on each side
FEWEST_STEPS = 3  # that a median is taken of
WRONG_BELOW = 0.5  # of the predicted gain

Verdict = Literal["kept", "wrong", "measured", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One change under measurement; gains are shares of the step's time before, up is good."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...] = ()
    predicted_gain: float | None = None  # of advice; None: somebody's own idea, which is only told

    def after_step(self, step_s: float) -> Effect:
        """With one more steady step."""
        return replace(self, after_s=(*self.after_s, step_s))

    @property
    def counted(self) -> int:
        """Steady steps since the change."""
        return len(self.after_s)

    @property
    def complete(self) -> bool:
        """Enough steps were seen."""
        return self.counted >= STEPS

    @property
    def median_before_s(self) -> float | None:
        """Of the steps before; None when there are too few."""
        return _median(self.before_s)

    @property
    def median_after_s(self) -> float | None:
        """Of the steps after; None when there are too few."""
        return _median(self.after_s)

    @property
    def gain(self) -> float | None:
        """Share of the step that the change saved; below 0 it cost; None when not known."""
        before, after = self.median_before_s, self.median_after_s
        return None if before is None or after is None else 1.0 - after / before

    @property
    def verdict(self) -> Verdict:
        """Advice that gave less than half of what it promised is wrong."""
        gain = self.gain
        if gain is None:
            return "unknown"
        if self.predicted_gain is None:
            return "measured"
        return "wrong" if gain < WRONG_BELOW * self.predicted_gain else "kept"


def _median(steps_s: tuple[float, ...]) -> float | None:
    return median(steps_s) if len(steps_s) >= FEWEST_STEPS else None
