"""Changes of a run while it trains: asked for at any time, made between two steps, measured.

The control socket's thread asks; the training loop carries out, measures and undoes. What is asked
for is judged at once, so that the answer tells, and again when it is made. A resumed run starts
with its configured window; its chunk is the checkpoint's, because the losses depend on it, unless
the user sets another one for the resume.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fluxtrain.errors import BadInput, DoesNotFit, FluxTrainError
from fluxtrain.live.adviser import Adviser, Setup
from fluxtrain.live.cards.rungs import CardRung, card_rungs
from fluxtrain.live.effect import STEPS, Effect
from fluxtrain.live.settings import (
    BY_ANOTHER_CHUNK,
    Change,
    LiveContext,
    LiveSettings,
    Use,
    parse_change,
    refuse_without_room,
    settings_after,
    steps_down,
)
from fluxtrain.live.steady import SteadySteps
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.planning.prediction import Promise
from fluxtrain.reporting.announce import Announcer
from fluxtrain.telemetry.events import (
    ChangeApplied,
    ChangeMeasured,
    ChangeRefused,
    MeasuringChange,
    StepFinished,
)

Why = Literal["asked", "advice", "undo", "wrong", "memory"]
SAME_BITS = frozenset(
    {
        "prefetch",
        "resident_blocks",
        "device_groups",
        "blocks_without_recompute",
        "activations_on_device",
    }
)


Turn = Callable[[Placement], None]  # raises DoesNotFit and leaves the engine as it was


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A change that waits for the end of the step."""

    change: Change
    why: Why
    advice: str = ""
    predicted_gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class Made:
    """A change that was made."""

    wish: Wish
    before: int


class LiveChanges:
    """The changes of one run."""

    def __init__(
        self,
        setup: Setup,
        announcer: Announcer,
        turn: Turn,
        *,
        chunk_rows: Callable[[], int],
        use: Callable[[], Use],
        promise_of: Callable[[LiveContext, LiveSettings], Promise],
    ) -> None:
        self._context = setup.context
        self._announcer = announcer
        self._turn = turn
        self._chunk_rows = chunk_rows
        self._use = use
        self._promise_of = promise_of
        self._settings = setup.context.planned
        self.promise: Promise | None = None  # of the settings in force; None: as planned
        self.steps_since = 0  # of the settings in force
        self._adviser = Adviser(setup, announcer)
        self._steady = SteadySteps()
        self._lock = threading.RLock()
        self._wishes: list[Wish] = []  # that wait for the end of the step
        self._peak_is_known = False  # a whole step was seen under the present settings
        self._made: list[Made] = []  # the newest last; what `undo` takes back
        self._measured: tuple[Made, Effect] | None = None

    @property
    def settings(self) -> LiveSettings:
        """As they are now."""
        return replace(self._settings, chunk_rows=self._chunk_rows())

    # -- asked for, by the thread of the control socket

    def ask(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Answer `apply` and `undo`; what is accepted is made after the step under way."""
        with self._lock:
            try:
                if self._wishes:
                    raise BadInput(f"{self._wishes[0].change} waits for the end of this step")
                wish = self._undo() if command == "undo" else self._wished(arguments)
                self._settings_after(wish)
            except FluxTrainError as error:
                return False, str(error)
            self._wishes.append(wish)
            change, now = wish.change, getattr(self.settings, wish.change.name)
        differs = "" if change.name in SAME_BITS else f"; losses then differ {BY_ANOTHER_CHUNK}"
        return True, f"{change.name} goes from {now} to {change.value} after this step{differs}"

    def _wished(self, arguments: Mapping[str, Any]) -> Wish:
        if "advice" not in arguments:
            return Wish(change=parse_change(arguments), why="asked")
        advice = self._adviser.get(str(arguments["advice"]))
        if advice is None or len(arguments) > 1:
            held = ", ".join(self._adviser.ids) or "none holds now"
            raise BadInput(f"there is no advice {arguments['advice']!r}: {held}")
        if advice.change is None:
            raise BadInput(f"this cannot change while a run trains; for the next run: {advice.how}")
        if self._measured is not None:
            made, effect = self._measured
            raise BadInput(
                f"{made.wish.change} is measured ({effect.counted} of {STEPS} steps): wait, or undo"
            )
        return Wish(
            change=advice.change, why="advice", advice=advice.id, predicted_gain=advice.gain
        )

    def _undo(self) -> Wish:
        if not self._made:
            raise BadInput("nothing was changed since this process started")
        last = self._made[-1]
        return Wish(change=Change(name=last.wish.change.name, value=last.before), why="undo")

    # -- carried out, by the training loop

    @property
    def waiting(self) -> bool:
        """Whether a change waits for the end of the step."""
        return bool(self._wishes)

    def carry_out(self, step: int, still: Callable[[], None]) -> None:
        """Make what waits, if anything does; between two steps, once `still` has waited until
        nothing reads the engine's memory."""
        with self._lock:
            wishes, self._wishes = self._wishes, []
            if wishes:
                still()
            for wish in wishes:
                self._make(wish, step)

    def step_took(self, step: StepFinished) -> None:
        """A step was done: measure the newest change, or look for advice."""
        with self._lock:
            self._peak_is_known = True
            self.steps_since += 1
            if not self._steady.took(step):
                return
            if self._measured is not None:
                self._measure(step)
            elif self._steady.worth_a_look and not self._context.several_cards:
                self._adviser.look(self._steady.looked_at(), self.settings, self._known_use())

    def disturbed(self) -> None:
        """Something else than steps happened: the next step tells nothing."""
        with self._lock:
            self._steady.disturb()

    def make_room(
        self, step: int, lost_s: float, gpu: int | None = None, *, backward: bool = True
    ) -> str | None:
        """Device memory ran out in the step after `step`, `lost_s` after it began, of several GPUs
        on `gpu`: give up what the rules say, so that it can be done again. In words what; None when
        nothing is left."""
        with self._lock:
            rung = self._rung_taken(gpu, backward=backward)
            if rung is not None:
                self._stop_measuring(step)
                self._made = [made for made in self._made if made.wish.change.name != rung.name]
                change = Change(name=rung.name, value=rung.after)
                self._tell_applied(Wish(change=change, why="memory"), rung.before, step, rung.index)
                self._steady.restart()
                return str(rung)
            for change in steps_down(self._context, self.settings, backward=backward):
                before = self._context.held(self.settings, change.name)
                if self._gave_up(change):
                    break
            else:
                return None
            self._stop_measuring(step)
            self._made = [made for made in self._made if made.wish.change.name != change.name]
            self._tell_applied(Wish(change=change, why="memory"), before, step)
            self._steady.restart()
            if change.name == "chunk_rows":
                self._adviser.ran_out(before, lost_s, change.value)
                return f"chunks of {change.value} rows instead of {before}"
            return f"{change.name} {change.value} instead of {before}"

    def finish(self, step: int) -> None:
        """The run ends: tell what a change under measurement was worth so far."""
        with self._lock:
            self._stop_measuring(step)

    # -- inside

    def _gave_up(self, change: Change) -> bool:
        """Whether a rung could be taken: what leaves the device must find room on the host."""
        now, new = self.settings, change.applied_to(self.settings)
        try:
            refuse_without_room(self._context, now, new, replace(self._use(), device_peak_bytes=0))
            self._turn_to(new)
        except DoesNotFit:
            return False
        return True

    def _rung_taken(self, gpu: int | None, *, backward: bool) -> CardRung | None:
        """Give up what the card that ran out has alone, where that is possible."""
        earlier = self._context
        if not earlier.several_cards:
            return None
        now = earlier.placement_with(self.settings)
        has_gpu = earlier.has_gpu
        for rung in card_rungs(earlier.facts, now, gpu, backward=backward, has_gpu=has_gpu):
            room = self._use().host_available_bytes
            if room is not None and rung.to_host_bytes > room:
                continue
            self._context = replace(earlier, placement=rung.placement)
            try:
                self._turn_to(replace(self._context.planned, chunk_rows=self._chunk_rows()))
            except DoesNotFit:
                self._context = earlier
                continue
            return rung
        return None

    def _turn_to(self, new: LiveSettings) -> None:
        self._turn(self._context.placement_with(new))
        context = self._context
        before = self.promise or self._promise_of(context, context.planned)
        self.promise, self.steps_since = self._promise_of(context, new).after(before), 0
        self._settings, self._peak_is_known = new, False

    def _make(self, wish: Wish, step: int) -> None:
        change, now = wish.change, self.settings
        try:
            new = self._settings_after(wish)
            self._turn_to(new)
        except (BadInput, DoesNotFit) as error:
            self._announcer.emit(
                ChangeRefused(
                    step=step,
                    name=change.name,
                    value=change.value,
                    because=str(error),
                    advice=wish.advice,
                )
            )
            return
        self._stop_measuring(step)
        before = getattr(now, change.name)
        self._tell_applied(wish, before, step)
        self._adviser.withdraw(wish.advice)
        if wish.why in ("undo", "wrong"):
            self._made.pop()
        else:
            made = Made(wish=wish, before=before)
            self._made.append(made)
            effect = Effect(before_s=self._steady.seconds, predicted_gain=wish.predicted_gain)
            self._measured = made, effect
        self._steady.restart()

    def _settings_after(self, wish: Wish) -> LiveSettings:
        back = wish.why in ("undo", "wrong")
        return settings_after(
            self._context, self.settings, wish.change, self._known_use(), back=back
        )

    def _known_use(self) -> Use:
        use = self._use()
        return use if self._peak_is_known else replace(use, device_peak_bytes=None)

    def _tell_applied(self, wish: Wish, before: int, step: int, card: int | None = None) -> None:
        change, promise = wish.change, self.promise
        assert promise is not None
        self._announcer.emit(
            ChangeApplied(
                step=step,
                name=change.name,
                before=before,
                after=change.value,
                why=wish.why,
                advice=wish.advice,
                card=card,
                predicted_gain=wish.predicted_gain,
                same_bits=change.name in SAME_BITS,
                device_bytes=promise.device_bytes,
                host_bytes=promise.host_bytes,
                step_s=promise.step_s,
                tokens_per_s=promise.tokens_per_s,
                binds=promise.binds,
            )
        )

    def _measure(self, step: StepFinished) -> None:
        assert self._measured is not None
        made, effect = self._measured
        effect = effect.after_step(step.step_s)
        self._measured = made, effect
        if not effect.complete:
            name = made.wish.change.name
            self._announcer.gauge(MeasuringChange(name=name, counted=effect.counted, wanted=STEPS))
            return
        self._stop_measuring(step.step)
        if effect.verdict == "wrong":
            self._adviser.disproved(made.wish.change)
            if all(wish.why != "undo" for wish in self._wishes):
                back = Change(name=made.wish.change.name, value=made.before)
                self._wishes.insert(0, Wish(change=back, why="wrong"))

    def _stop_measuring(self, step: int) -> None:
        """Say what is known of the newest change so far; it is not measured any further."""
        if self._measured is None:
            return
        (made, effect), self._measured = self._measured, None
        change = made.wish.change
        self._announcer.emit(
            ChangeMeasured(
                step=step,
                name=change.name,
                before=made.before,
                after=change.value,
                verdict=effect.verdict,
                measured_gain=effect.gain,
                predicted_gain=effect.predicted_gain,
                advice=made.wish.advice,
                before_s=effect.median_before_s,
                after_s=effect.median_after_s,
                steps_before=len(effect.before_s),
                steps_after=effect.counted,
            )
        )
