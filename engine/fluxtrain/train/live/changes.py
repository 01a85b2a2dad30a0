"""Changes of a run while it trains: asked for at any time, made between two steps, measured.

The control socket's thread asks; the training loop applies, measures and undoes. A request is
judged at once, so that the answer says whether it will be made, and again when it is made. A
change is worth the median of the steady steps before it against that of those after. A resumed run
starts with its configured window; its chunk is the checkpoint's, because the losses
depend on it, unless the user sets another one for the resume.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.errors import BadInput, DoesNotFit, FluxTrainError
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import (
    ChangeApplied,
    ChangeMeasured,
    ChangeRefused,
    MeasuringChange,
    StepFinished,
)
from fluxtrain.plan.placement import Placement
from fluxtrain.train.live.advice import StepFacts
from fluxtrain.train.live.adviser import Adviser, Setup
from fluxtrain.train.live.edit import (
    MemoryInUse,
    refuse_without_host_room,
    refuse_without_room,
    settings_after,
)
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.out_of_memory import NOTHING_LEFT, FallbackStep, fallback_steps
from fluxtrain.train.live.settings import (
    LOSSES_DIFFER,
    Change,
    LiveSettings,
    keeps_bits,
    parse_change,
)
from fluxtrain.train.placing.prediction import Promise

STEPS = 20  # on each side
CALM_STEPS = 20  # in which there was room for what had to be given up
FEWEST_STEPS = 3  # that a median is taken of
WRONG_BELOW = 0.5  # of the predicted gain

Verdict = Literal["kept", "wrong", "measured", "unknown"]
Why = Literal["asked", "advice", "undo", "wrong", "memory", "room", "host"]


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
        """Return the value of the setting before the change."""
        return self.before.value(self.request.change.name)

    @property
    def back(self) -> Change:
        """Return the change that undoes this one."""
        return Change(name=self.request.change.name, value=self.value_before)


class Measurement:
    """Measures the newest change in steady steps, and reports its gain."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self.under_way: AppliedChange | None = None  # the change that is measured
        self._before_s: tuple[float, ...] = ()
        self._after_s: tuple[float, ...] = ()

    @property
    def counted(self) -> int:
        """Return the steady steps since that change."""
        return len(self._after_s)

    def begin(self, applied: AppliedChange, before_s: tuple[float, ...]) -> None:
        """Measure a change from now on; `before_s` are steady steps before it."""
        self.under_way, self._before_s, self._after_s = applied, before_s, ()

    def step_took(self, step: int, step_s: float) -> Verdict | None:
        """Count a steady step; return the verdict once there are enough."""
        assert self.under_way is not None
        self._after_s += (step_s,)
        if self.counted < STEPS:
            name = self.under_way.request.change.name
            self._announcer.gauge(MeasuringChange(name=name, counted=self.counted, wanted=STEPS))
            return None
        return self.end(step)

    def end(self, step: int) -> Verdict | None:
        """Report what is known of the change so far, and stop measuring it."""
        applied, self.under_way = self.under_way, None
        if applied is None:
            return None
        before_s, after_s = _median(self._before_s), _median(self._after_s)
        gain = None if before_s is None or after_s is None else 1.0 - after_s / before_s
        verdict = _verdict(gain, applied)
        self._announcer.emit(
            ChangeMeasured(
                step=step,
                name=applied.request.change.name,
                before=applied.value_before,
                after=applied.request.change.value,
                verdict=verdict,
                measured_gain=gain,
                predicted_gain=applied.request.predicted_gain,
                advice=applied.request.advice,
                before_s=before_s,
                after_s=after_s,
                steps_before=len(self._before_s),
                steps_after=self.counted,
            )
        )
        return verdict


def _median(steps_s: tuple[float, ...]) -> float | None:
    return median(steps_s) if len(steps_s) >= FEWEST_STEPS else None


def _verdict(gain: float | None, applied: AppliedChange) -> Verdict:
    """Judge a change: advice that gave less than half of its promise is wrong."""
    promised = applied.request.predicted_gain
    if gain is None:
        return "unknown"
    if promised is None:  # the user's own change
        return "measured"
    return "wrong" if gain < WRONG_BELOW * promised else "kept"


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
        """Leave the next step out of the measurement: something else runs before it."""
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
        """Return the seconds of each step."""
        return tuple(step.step_s for step in self._steps)

    @property
    def worth_a_look(self) -> bool:
        """Return whether enough steps were counted, all of them since the last look."""
        return self._unseen >= STEPS

    def looked_at(self) -> StepFacts:
        """Return the means of the steps; at least one must have been counted."""
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


Apply = Callable[[Placement], None]  # raises DoesNotFit and leaves the engine as it was


class LiveChanges:
    """The changes of one run."""

    def __init__(
        self,
        setup: Setup,
        announcer: Announcer,
        apply: Apply,
        *,
        chunk_rows: Callable[[], int],
        memory: Callable[[], MemoryInUse],
        promise_of: Callable[[LiveRun, LiveSettings], Promise],
    ) -> None:
        self._run = setup.run
        self._announcer = announcer
        self._apply = apply
        self._chunk_rows = chunk_rows
        self._memory = memory
        self._promise_of = promise_of
        self._settings = setup.run.planned
        self.promise: Promise | None = None  # of the settings in force; None: as planned
        self.steps_since = 0  # of the settings in force
        self._adviser = Adviser(setup, announcer)
        self._steady = SteadySteps()
        self._lock = threading.RLock()
        self._requests: list[ChangeRequest] = []  # that wait for the end of the step
        self._peak_is_known = False  # a whole step was seen under the present settings
        self._applied: list[AppliedChange] = []  # the newest last; what `undo` takes back
        self._given_up: list[tuple[LiveRun, FallbackStep]] = []  # while others had the memory
        self._calm_steps = 0
        self._measurement = Measurement(announcer)

    @property
    def settings(self) -> LiveSettings:
        """Return the settings in force."""
        return replace(self._settings, chunk_rows=self._chunk_rows())

    # -- requests, in the thread of the control socket

    def ask(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Answer `apply` and `undo`; an accepted change is made after the current step."""
        with self._lock:
            try:
                if self._requests:
                    raise BadInput(f"{self._requests[0].change} waits for the end of this step")
                request = self._undo() if command == "undo" else self._requested(arguments)
                self._settings_after(request)
            except FluxTrainError as error:
                return False, str(error)
            self._requests.append(request)
            change = request.change
            now = self.settings.value(change.name)
        differs = "" if keeps_bits(change.name) else f"; losses then differ {LOSSES_DIFFER}"
        return True, f"{change.name} goes from {now} to {change.value} after this step{differs}"

    def _requested(self, arguments: Mapping[str, Any]) -> ChangeRequest:
        if "advice" not in arguments:
            return ChangeRequest(change=parse_change(arguments), why="asked")
        advice = self._adviser.get(str(arguments["advice"]))
        if advice is None or len(arguments) > 1:
            held = ", ".join(self._adviser.ids) or "none holds now"
            raise BadInput(f"there is no advice {arguments['advice']!r}: {held}")
        if advice.change is None:
            raise BadInput(f"this cannot change while a run trains; for the next run: {advice.how}")
        if (measured := self._measurement.under_way) is not None:
            raise BadInput(
                f"{measured.request.change} is measured ({self._measurement.counted} of {STEPS} "
                "steps): wait, or undo"
            )
        return ChangeRequest(
            change=advice.change, why="advice", advice=advice.id, predicted_gain=advice.gain
        )

    def _undo(self) -> ChangeRequest:
        if not self._applied:
            raise BadInput(
                "there is nothing to undo: nothing was changed since this process started, or "
                "since device memory ran out"
            )
        return ChangeRequest(change=self._applied[-1].back, why="undo")

    # -- between two steps, in the thread of the training loop

    @property
    def waiting(self) -> bool:
        """Return whether a change waits for the end of the step."""
        return bool(self._requests)

    def carry_out(self, step: int, still: Callable[[], None]) -> None:
        """Make the waiting changes, after `still` has waited until nothing reads the engine's
        memory."""
        with self._lock:
            requests, self._requests = self._requests, []
            if requests:
                still()
            for request in requests:
                self._make(request, step)

    def step_took(self, step: StepFinished) -> None:
        """Measure the newest change with a finished step, or look for advice."""
        with self._lock:
            self._peak_is_known = True
            self.steps_since += 1
            if not self._steady.took(step):
                return
            applied = self._measurement.under_way
            if applied is not None:
                if self._measurement.step_took(step.step, step.step_s) == "wrong":
                    self._take_back(applied)
            elif self._steady.worth_a_look and self._run.cards == 1:  # rates are those of one card
                steps, memory = self._steady.looked_at(), self._known_memory()
                self._adviser.look(self._run, steps, self.settings, memory)

    def disturbed(self) -> None:
        """Leave the next step out of measurements: something else runs before it."""
        with self._lock:
            self._steady.disturb()

    def keep_room(self, step: int, lacks_bytes: Sequence[int], still: Callable[[], None]) -> None:
        """Give settings up before the step after `step` where other programs took a card's memory,
        and take them back after calm steps.

        lacks_bytes: of each card, as `TrainingEngine.lacks_bytes`. still: as for `carry_out`.
        """
        with self._lock:
            for card, lack_bytes in enumerate(lacks_bytes):
                index = self._run.placement.cards[card].index
                needed = self._run.device_bytes(self.settings, card) - lack_bytes
                while lack_bytes > 0 and self._run.device_bytes(self.settings, card) > needed:
                    still()
                    if self.make_room(step, 0.0, index, others=True) is None:
                        break
            if not self._given_up:
                return
            run, newest = self._given_up[-1]
            grown = [
                run.device_bytes(run.planned, card) - self._run.device_bytes(self.settings, card)
                for card in range(run.cards)
            ]
            has_room = all(more <= -lack for more, lack in zip(grown, lacks_bytes, strict=True))
            self._calm_steps = self._calm_steps + 1 if has_room else 0
            if self._calm_steps >= CALM_STEPS:
                still()
                self._take_again(run, newest, step)

    def free_host(self, step: int, size_bytes: int, still: Callable[[], None]) -> bool:
        """Let optimizer states of the fewest groups that free so many bytes of the host live on
        disk from now on; return False where none can. The bits stay. still: as for `carry_out`."""
        with self._lock:
            now = self.settings
            new = self._run.states_to_disk(now, size_bytes)
            if new is None:
                return False
            still()
            try:
                self._put_in_force(new)
            except (BadInput, DoesNotFit) as error:
                self._announcer.warn(f"optimizer states cannot leave the host's memory: {error}")
                return False
            self._run = self._run.left_with(new)
            self._applied.clear()  # the memory is gone
            self._given_up.clear()
            self._measurement.end(step)
            before, after = (sum(r.is_on("disk", "state") for r in s.rows) for s in (now, new))
            self._announcer.warn(
                f"host memory is short: optimizer states of {after - before} groups live on disk "
                "from now on, and each step reads and writes them; close other programs, then stop "
                "and go on with --resume auto to have them in memory again"
            )
            self._announcer.emit(
                ChangeApplied(step=step, name="disk_states", before=before, after=after, why="host")
            )
            self._steady.restart()
            return True

    def make_room(
        self,
        step: int,
        lost_s: float,
        gpu: int | None = None,
        *,
        backward: bool = True,
        others: bool = False,
        ranks: Ranks = ALONE,
        alike: bool = False,
        elsewhere: bool = False,
    ) -> str | None:
        """Give up one thing after device memory ran out in the step after `step`, so that it can
        be repeated; return what, or None when nothing is left.

        lost_s: seconds since the step began; gpu: the card that ran out, by torch's number;
        others: other programs have taken what was planned, and may give it back; ranks: all of
        them call this; alike: they must give up the same; elsewhere: another rank ran out.
        """
        with self._lock:
            now = self.settings
            before = self._run.left_with(now)
            card = self._run.card_at(gpu)
            (card,) = ranks.most([-1 if elsewhere or card is None else card])  # one for all
            gpu = None if card < 0 else self._run.placement.cards[card].index
            steps = list(fallback_steps(self._run, now, gpu, backward=backward))
            fallback = self._fall_back(now, steps, ranks, alike=alike, elsewhere=elsewhere)
            if fallback is None:
                return None
            if others:
                self._given_up.append((before, fallback))
            else:
                self._given_up.clear()
            self._calm_steps = 0
            self._measurement.end(step)
            self._applied.clear()  # going back could run out of memory again
            change = Change(name=fallback.name, value=fallback.after)
            request = ChangeRequest(change=change, why="memory")
            self._tell_applied(request, fallback.before, step, fallback.card)
            self._steady.restart()
            if change.name == "chunk_rows":
                self._adviser.ran_out(fallback.before, lost_s, change.value)
            return str(fallback)

    def finish(self, step: int) -> None:
        """Report, at the end of the run, the gain so far of a change under measurement."""
        with self._lock:
            self._measurement.end(step)

    # -- inside

    def _fall_back(
        self,
        now: LiveSettings,
        steps: Sequence[FallbackStep],
        ranks: Ranks,
        *,
        alike: bool,
        elsewhere: bool,
    ) -> FallbackStep | None:
        """Apply the first of the steps that can be made here, or a later one where another rank
        cannot make that one; return it, or None where a rank has none left.

        Ranks that are not `alike` choose for themselves, but for what lives on the device: rows of
        embeddings and chunks of heads on the host are exchanged in another way.
        """
        fallback, least, place = None, 0, -1
        while True:
            if place < least:
                left = (one for one in steps if one.rung(alike=alike) >= least)
                fallback = next((one for one in left if self._falls_back(now, one)), None)
                stays = elsewhere and not alike and not least
                place = 0 if stays else NOTHING_LEFT
                place = place if fallback is None else fallback.rung(alike=alike)
            most, fewest = ranks.most([place, -place])
            if most == -fewest:
                return fallback
            least = most

    def _falls_back(self, now: LiveSettings, fallback: FallbackStep) -> bool:
        """Apply a fallback; return False where the host has no room for what leaves the device."""
        try:
            refuse_without_host_room(self._run, now, fallback.settings, self._memory())
            self._put_in_force(fallback.settings)
        except DoesNotFit:
            return False
        self._run = self._run.left_with(fallback.settings)
        return True

    def _take_again(self, run: LiveRun, newest: FallbackStep, step: int) -> None:
        """Go back to `run`, as it was before the newest thing was given up."""
        self._given_up.pop()
        self._calm_steps = CALM_STEPS - 1  # the next one follows after a step
        try:
            refuse_without_host_room(self._run, self.settings, run.planned, self._memory())
            self._put_in_force(run.planned)
        except DoesNotFit:
            self._given_up.clear()
            return
        self._run = run
        change = Change(name=newest.name, value=newest.before)
        request = ChangeRequest(change=change, why="room")
        self._tell_applied(request, newest.after, step, newest.card)
        self._steady.restart()

    def _put_in_force(self, new: LiveSettings) -> None:
        self._apply(self._run.placement_with(new))
        before = self.promise or self._promise_of(self._run, self._run.planned)
        self.promise, self.steps_since = self._promise_of(self._run, new).after(before), 0
        self._settings, self._peak_is_known = new, False

    def _take_back(self, applied: AppliedChange) -> None:
        """Undo advice that was wrong, and never give it again."""
        self._adviser.disproved(applied.request.change)
        if all(request.why != "undo" for request in self._requests):
            self._requests.insert(0, ChangeRequest(change=applied.back, why="wrong"))

    def _make(self, request: ChangeRequest, step: int) -> None:
        change, now = request.change, self.settings
        try:
            self._put_in_force(self._settings_after(request))
        except (BadInput, DoesNotFit) as error:
            self._announcer.emit(
                ChangeRefused(
                    step=step,
                    name=change.name,
                    value=change.value,
                    because=str(error),
                    advice=request.advice,
                )
            )
            return
        self._given_up.clear()  # the user decides
        self._measurement.end(step)
        self._tell_applied(request, now.value(change.name), step)
        self._adviser.withdraw(request.advice)
        if request.why in ("undo", "wrong"):
            self._applied.pop()
        else:
            applied = AppliedChange(request=request, before=now)
            self._applied.append(applied)
            self._measurement.begin(applied, self._steady.seconds)
        self._steady.restart()

    def _settings_after(self, request: ChangeRequest) -> LiveSettings:
        """Return the settings after a request; raises where they are impossible."""
        now, memory = self.settings, self._known_memory()
        if request.why not in ("undo", "wrong"):
            return settings_after(self._run, now, request.change, memory)
        new = self._applied[-1].before
        if request.change.name != "chunk_rows":
            new = replace(new, chunk_rows=now.chunk_rows)
        refuse_without_room(self._run, now, new, memory)
        return new

    def _known_memory(self) -> MemoryInUse:
        memory = self._memory()
        return memory if self._peak_is_known else replace(memory, device_peak_bytes=None)

    def _tell_applied(
        self, request: ChangeRequest, before: int, step: int, card: int | None = None
    ) -> None:
        change, promise = request.change, self.promise
        assert promise is not None
        self._announcer.emit(
            ChangeApplied(
                step=step,
                name=change.name,
                before=before,
                after=change.value,
                why=request.why,
                advice=request.advice,
                card=card,
                predicted_gain=request.predicted_gain,
                same_bits=keeps_bits(change.name),
                device_bytes=promise.device_bytes,
                host_bytes=promise.host_bytes,
                step_s=promise.step_s,
                tokens_per_s=promise.tokens_per_s,
                binds=promise.binds,
            )
        )
