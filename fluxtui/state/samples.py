"""The answers to the run's prompts, by the step that they were given after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fluxtrain.events.events import SampleGenerated

ROUNDS_LIMIT = 64
ANSWERS_LIMIT = 64  # of a round


@dataclass(frozen=True, slots=True)
class Round:
    """All answers after one step, in the order of their prompts."""

    step: int
    count: int  # prompts that are asked
    answers: tuple[SampleGenerated, ...]

    @property
    def seconds(self) -> float | None:
        """Return the seconds that all answers took together."""
        return self.answers[-1].seconds


Rounds: TypeAlias = tuple[Round, ...]  # oldest first


def with_sample(rounds: Rounds, event: SampleGenerated) -> Rounds:
    """Add an answer; the first of a step begins a new round.

    A run without prompts makes one sample at its end, which belongs to no round.
    """
    if event.seconds is None:
        return rounds
    newest = rounds[-1] if rounds else None
    if newest is not None and newest.step == event.step and event.number > 1:
        answers = (*newest.answers, event)[:ANSWERS_LIMIT]
        return (*rounds[:-1], Round(event.step, event.count, answers))
    before = until(rounds, event.step - 1)  # a run that goes on does steps again
    return (*before, Round(event.step, event.count, (event,)))[-ROUNDS_LIMIT:]


def until(rounds: Rounds, step: int) -> Rounds:
    """Return the rounds up to `step`."""
    return tuple(one for one in rounds if one.step <= step)


def round_at(rounds: Rounds, step: int | None) -> Round | None:
    """Return the newest round up to `step`, else the first; None: there is none."""
    if step is None:
        return rounds[-1] if rounds else None
    return next(
        (one for one in reversed(rounds) if one.step <= step), rounds[0] if rounds else None
    )
