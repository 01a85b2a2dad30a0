"""The outcome of advice and of changes to the running training; folded from events, no Textual."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fluxtrain.events import events as ev

ADVICE_LIMIT = 8
TRIALS_LIMIT = 16
_BACK = ("undo", "wrong")


@dataclass(frozen=True, slots=True)
class TriedChange:
    """One change, from being made to its verdict."""

    change: ev.ChangeApplied
    counted: int = 0  # steady steps since the change, and how many are needed
    wanted: int = 0  # 0: not measured
    measured: ev.ChangeMeasured | None = None
    undone: ev.ChangeApplied | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the newest process; a new one starts from its configuration."""

    trials: tuple[TriedChange, ...] = ()  # oldest first
    asked: ev.CommandAnswered | None = None  # accepted, and not made yet
    refused: ev.ChangeRefused | None = None  # the newest one that failed
    last_step: int = 0  # the last one before the newest change, or before it was taken back

    @property
    def newest(self) -> TriedChange | None:
        """Return the most recent trial."""
        return self.trials[-1] if self.trials else None

    @property
    def now(self) -> dict[str, int]:
        """Return the settings changed since the start, with their present values."""
        found: dict[str, int] = {}
        for trial in self.trials:
            if trial.change.card is not None:  # the others are as they were
                continue
            found[trial.change.name] = trial.change.after
            if trial.undone is not None:
                found[trial.change.name] = trial.undone.after
        return found

    def answered(self, event: ev.CommandAnswered) -> Changes:
        """Note that a change was asked for and accepted."""
        wanted = event.ok and event.command in ("apply", "undo")
        return replace(self, asked=event) if wanted else self

    def made(self, event: ev.ChangeApplied) -> Changes:
        """Note that a change was made, or taken back."""
        cleared = replace(self, asked=None, refused=None, last_step=event.step)
        if event.why not in _BACK:
            return replace(cleared, trials=(*self.trials, TriedChange(event))[-TRIALS_LIMIT:])
        for at in reversed(range(len(self.trials))):
            change = self.trials[at].change
            open_still = self.trials[at].undone is None
            if open_still and (change.name, change.after) == (event.name, event.before):
                return replace(cleared, trials=self._with(at, undone=event))
        return replace(cleared, trials=(*self.trials, TriedChange(event))[-TRIALS_LIMIT:])

    def not_made(self, event: ev.ChangeRefused) -> Changes:
        """Note that an accepted change could not be made."""
        return replace(self, asked=None, refused=event)

    def measuring(self, event: ev.MeasuringChange) -> Changes:
        """Note one more step of a measurement."""
        if not self.trials or self.trials[-1].change.name != event.name:
            return self
        return replace(self, trials=self._with(-1, counted=event.counted, wanted=event.wanted))

    def verdict(self, event: ev.ChangeMeasured) -> Changes:
        """Note the result of a measurement."""
        for at in reversed(range(len(self.trials))):
            change = self.trials[at].change
            if (change.name, change.before, change.after) == (
                event.name, event.before, event.after,
            ):  # fmt: skip
                return replace(self, trials=self._with(at, measured=event))
        return self

    def _with(self, at: int, **changes: object) -> tuple[TriedChange, ...]:
        trials = list(self.trials)
        trials[at] = replace(trials[at], **changes)  # type: ignore[arg-type]
        return tuple(trials)


def with_advice(
    held: tuple[ev.AdviceGiven, ...], given: ev.AdviceGiven
) -> tuple[ev.AdviceGiven, ...]:
    """Add a piece of advice, in place of an older one with the same subject."""
    kept = tuple(one for one in held if (one.id or one.text) != (given.id or given.text))
    return (*kept, given)[-ADVICE_LIMIT:]


def without_advice(held: tuple[ev.AdviceGiven, ...], gone: str) -> tuple[ev.AdviceGiven, ...]:
    """Return the advice that still holds, without the withdrawn piece."""
    return tuple(one for one in held if one.id != gone)


def ranked(held: Iterable[ev.AdviceGiven]) -> list[ev.AdviceGiven]:
    """Sort by predicted gain, largest first; advice without one (older runs) last, newest first."""
    newest_first = list(held)[::-1]
    return sorted(newest_first, key=lambda one: -(one.gain_share or 0.0))
