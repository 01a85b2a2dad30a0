"""What a change was worth: the median of the steady steps before it against that of those after.

Steady steps are those without an evaluation, a checkpoint, a pause or another change around them;
`SteadySteps` leaves the others out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import ChangeMeasured, MeasuringChange, StepFinished
from fluxtrain.train.live.advice import StepFacts
from fluxtrain.train.live.settings import Change, LiveSettings

STEPS = 20  # on each side
FEWEST_STEPS = 3  # that a median is taken of
WRONG_BELOW = 0.5  # of the predicted gain

Verdict = Literal["kept", "wrong", "measured", "unknown"]
Why = Literal["asked", "advice", "undo", "wrong", "memory"]


@dataclass(frozen=True, kw_only=True)
class ChangeRequest:
    """A change that waits for the end of the step."""

    change: Change
    why: Why
    advice: str = ""
    predicted_gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class AppliedChange:
    """A change that was made, with the settings that undo it."""

    request: ChangeRequest
    before: LiveSettings

    @property
    def value_before(self) -> int:
        """The value of the setting before."""
        return self.before.value(self.request.change.name)

    @property
    def back(self) -> Change:
        """The change that undoes it."""
        return Change(name=self.request.change.name, value=self.value_before)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One change under measurement; gains are shares of the step's time before, up is good."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...] = ()
    predicted_gain: float | None = None  # of advice; None: the user's own change, never "wrong"

    def after_step(self, step_s: float) -> Effect:
        """Return the effect with one more steady step."""
        return replace(self, after_s=(*self.after_s, step_s))

    @property
    def counted(self) -> int:
        """Steady steps since the change."""
        return len(self.after_s)

    @property
    def complete(self) -> bool:
        """Whether enough steps were seen."""
        return self.counted >= STEPS

    @property
    def median_before_s(self) -> float | None:
        """The median of the steps before; None when there are too few."""
        return _median(self.before_s)

    @property
    def median_after_s(self) -> float | None:
        """The median of the steps after; None when there are too few."""
        return _median(self.after_s)

    @property
    def gain(self) -> float | None:
        """Share of the step that the change saved; below 0 it cost; None when not known."""
        before, after = self.median_before_s, self.median_after_s
        return None if before is None or after is None else 1.0 - after / before

    @property
    def verdict(self) -> Verdict:
        """What to say of the change: advice that gave less than half of its promise is wrong."""
        gain = self.gain
        if gain is None:
            return "unknown"
        if self.predicted_gain is None:
            return "measured"
        return "wrong" if gain < WRONG_BELOW * self.predicted_gain else "kept"


def _median(steps_s: tuple[float, ...]) -> float | None:
    return median(steps_s) if len(steps_s) >= FEWEST_STEPS else None


class Measurement:
    """Measures the newest change in steady steps, and tells what it was worth."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._applied: AppliedChange | None = None
        self._effect = Effect(before_s=())

    @property
    def under_way(self) -> AppliedChange | None:
        """The change that is measured."""
        return self._applied

    @property
    def counted(self) -> int:
        """Steady steps since that change."""
        return self._effect.counted

    def begin(self, applied: AppliedChange, before_s: tuple[float, ...]) -> None:
        """Measure a change from now on; `before_s` are steady steps before it."""
        self._applied = applied
        self._effect = Effect(before_s=before_s, predicted_gain=applied.request.predicted_gain)

    def step_took(self, step: int, step_s: float) -> Verdict | None:
        """Count a steady step; return the verdict once there are enough."""
        assert self._applied is not None
        self._effect = effect = self._effect.after_step(step_s)
        if not effect.complete:
            name = self._applied.request.change.name
            self._announcer.gauge(MeasuringChange(name=name, counted=effect.counted, wanted=STEPS))
            return None
        self.end(step)
        return effect.verdict

    def end(self, step: int) -> None:
        """Tell what is known of the change so far; it is not measured any further."""
        if self._applied is None:
            return
        (applied, effect), self._applied = (self._applied, self._effect), None
        self._announcer.emit(
            ChangeMeasured(
                step=step,
                name=applied.request.change.name,
                before=applied.value_before,
                after=applied.request.change.value,
                verdict=effect.verdict,
                measured_gain=effect.gain,
                predicted_gain=effect.predicted_gain,
                advice=applied.request.advice,
                before_s=effect.median_before_s,
                after_s=effect.median_after_s,
                steps_before=len(effect.before_s),
                steps_after=effect.counted,
            )
        )


_WARM_UP_STEPS = 2  # of a process: caches are built, the first copies are on demand


class SteadySteps:
    """The last steady steps under the present settings.

    After an evaluation, a checkpoint, a pause or a change nothing of the optimizer is left to wait
    for, and slots are empty: the step that follows is shorter or longer than the others.
    """

    def __init__(self) -> None:
        self._skip = _WARM_UP_STEPS
        self._unseen = 0
        self._steps: deque[StepFinished] = deque(maxlen=STEPS)

    def disturb(self) -> None:
        """Leave the next step out, because something else happens before it."""
        self._skip = max(self._skip, 1)

    def took(self, step: StepFinished) -> bool:
        """Note a step and return whether it counts."""
        if self._skip:
            self._skip -= 1
            return False
        self._steps.append(step)
        self._unseen += 1
        return True

    def restart(self) -> None:
        """Forget all steps, because settings changed."""
        self._steps.clear()
        self._unseen = 0
        self.disturb()

    @property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of each step."""
        return tuple(step.step_s for step in self._steps)

    @property
    def worth_a_look(self) -> bool:
        """Whether there are enough steps, all of them new since the last look."""
        return self._unseen >= STEPS

    def looked_at(self) -> StepFacts:
        """Return the means of the steps, of which there must be some."""
        self._unseen = 0
        steps = list(self._steps)
        causes = {cause for step in steps for cause in step.stalls_s}
        return StepFacts(
            count=len(steps),
            step_s=fmean(step.step_s for step in steps),
            forward_s=_mean_phase(steps, "forward"),
            backward_s=_mean_phase(steps, "backward"),
            data_s=_mean_phase(steps, "data"),
            stalls_s={
                cause: fmean(step.stalls_s.get(cause, 0.0) for step in steps) for cause in causes
            },
        )


def _mean_phase(steps: Sequence[StepFinished], phase: str) -> float:
    return fmean(step.phases_s.get(phase, 0.0) for step in steps)
