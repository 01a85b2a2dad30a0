"""A miniature that computes resident and streams in turn, until two rounds found the same.

What streaming costs beside its bytes is a small difference between two steps, and counts once for
every group of the model. Other programs, and fresh pages that the system has to find first (a
virtual machine's host too), can make all steps of one kind slow for a second. Only slower: so the
fastest step of each kind counts, once another round comes near to it. Of what else is timed the
median over all rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fluxtrain.calibration.block_timing import Trial
from fluxtrain.hardware.others import BUSY_SHARE, others_share, read_use

SAME = 0.05  # steps that differ by less agree
ROUNDS_S = 6.5  # no further round begins later
MOST_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of steps of the miniature."""

    trials: Mapping[str, Trial]  # by name; of "many" rows in every round
    streamed_s: Sequence[float]  # steps with the many rows, streamed, with their updates
    copied_bytes: int  # of one such step

    @property
    def fastest(self) -> tuple[float, float]:
        """The resident step of the many rows, and the streamed one."""
        return min(self.trials["many"].seconds["whole"]), min(self.streamed_s)


@dataclass(frozen=True)
class Rounds:
    """What was found until two agreed, or time was up."""

    rounds: Sequence[Round]
    others_share: float | None  # of all processors, used by other programs meanwhile

    def trials(self) -> dict[str, Trial]:
        """By name, with the steps of all rounds."""
        found: dict[str, Trial] = {}
        for one in self.rounds:
            for name, trial in one.trials.items():
                found.setdefault(name, Trial(trial.rows)).add(trial)
        return found

    def longer_s(self) -> float | None:
        """What the fastest streamed step took beyond the fastest resident one. None where other
        programs disturbed the rounds and no two agree: then it says more about those."""
        found = [one.fastest for one in self.rounds]
        if not agree(found) and (self.others_share or 0.0) >= BUSY_SHARE:
            return None
        resident_s = min(resident for resident, _ in found)
        return min(streamed for _, streamed in found) - resident_s


def until_agreed(
    one_round: Callable[[bool], Round], clock: Callable[[], float] = time.monotonic
) -> Rounds:
    """Rounds until two agree, no more than there is time for; `one_round` is told whether it makes
    the first."""
    before, started_s = read_use(), clock()
    rounds: list[Round] = []
    while True:
        rounds.append(one_round(not rounds))
        late = clock() - started_s > ROUNDS_S
        if late or len(rounds) == MOST_ROUNDS or agree([one.fastest for one in rounds]):
            return Rounds(rounds, others_share(before))


def agree(fastest: Sequence[tuple[float, float]]) -> bool:
    """Was the fastest step of each kind (resident, streamed) nearly reached in a second round?"""
    if len(fastest) < 2:
        return False
    pairs = (sorted(seconds)[:2] for seconds in zip(*fastest, strict=True))
    return all(second <= first * (1 + SAME) for first, second in pairs)
