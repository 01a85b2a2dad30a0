"""Pick the steps that tell how fast a run is: nothing else happened around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from fluxtrain.events.events import StepFinished
from fluxtrain.train.live.effect import STEPS
from fluxtrain.train.live.run_facts import StepFacts

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
