"""Look at the steady steps of a run now and then, and say what would make it faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import AdviceGiven, AdviceWithdrawn
from fluxtrain.events.trace.lanes import StepLanes, queued_s
from fluxtrain.machine.system import memory_waited_s
from fluxtrain.plan.rates import Rates
from fluxtrain.train.live.advice import Advice, RunFacts, StepFacts, advise, redone
from fluxtrain.train.live.edit import MemoryInUse
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import Change, LiveSettings

_SAME_GAIN = 0.05  # a prediction that moved less is the same advice


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What changes and advice need to know about a run at its start."""

    run: LiveRun
    passes: int  # backward passes a step
    clips: bool
    rates: Rates | None  # None: not measured on this machine
    lanes: Callable[[], Sequence[StepLanes]] = tuple  # of the last steps
    run_times: float = 1.0  # what steps of the last run took, of what `rates` predict


class Adviser:
    """Keeps the valid advice, by id; announces new advice, and advice that no longer holds."""

    def __init__(self, setup: Setup, announcer: Announcer) -> None:
        self._setup = setup
        self._announcer = announcer
        self._given: dict[str, Advice] = {}
        self._disproved: set[Change] = set()
        self._failed_chunk_rows: int | None = None
        self._redone_s = 0.0
        self._started_s = time.monotonic()
        self._pressure = (time.monotonic(), memory_waited_s())

    def get(self, advice_id: str) -> Advice | None:
        """Return the advice of this id, if it holds."""
        return self._given.get(advice_id)

    @property
    def ids(self) -> list[str]:
        """Return the ids of all advice that holds."""
        return list(self._given)

    def disproved(self, change: Change) -> None:
        """Never advise a change again that was tried and gave too little."""
        self._disproved.add(change)

    def ran_out(self, failed_rows: int, lost_s: float, chunk_rows: int) -> None:
        """Advise a smaller chunk for the next run. Device memory ran out with chunks of
        `failed_rows`, `lost_s` into a step that is repeated with `chunk_rows`."""
        self._failed_chunk_rows = min(failed_rows, self._failed_chunk_rows or failed_rows)
        self._redone_s += lost_s
        self._hold(redone(self._failed_chunk_rows, chunk_rows, self._redone_share))

    def look(
        self, run: LiveRun, steps: StepFacts, settings: LiveSettings, memory: MemoryInUse
    ) -> None:
        """Judge the last steady steps, and update the advice."""
        recorded = list(self._setup.lanes())[-steps.count :]
        if recorded:
            steps = replace(steps, queued_s=fmean(map(queued_s, recorded)))
        found = advise(
            RunFacts(
                run=run,
                settings=settings,
                steps=steps,
                memory=memory,
                rates=self._setup.rates,
                passes=self._setup.passes,
                clips=self._setup.clips,
                failed_chunk_rows=self._failed_chunk_rows,
                redone_share=self._redone_share,
                pressure_share=self._pressure_share(),
                disproved=frozenset(self._disproved),
            )
        )
        for gone in self._given.keys() - {advice.id for advice in found}:
            self.withdraw(gone)
        for advice in found:
            self._hold(advice)

    def withdraw(self, advice_id: str) -> None:
        """Announce that advice holds no more, because it was followed or its cause has passed."""
        if self._given.pop(advice_id, None) is not None:
            self._announcer.emit(AdviceWithdrawn(id=advice_id))

    def _hold(self, advice: Advice) -> None:
        """Announce advice, unless it is already announced and has hardly changed."""
        if not _is_news(advice, self._given.get(advice.id)):
            return
        self._given[advice.id] = advice
        change = advice.change
        self._announcer.emit(
            AdviceGiven(
                text=advice.because,
                gain=f"{advice.gain:.1%} of the step time",
                how=advice.how,
                id=advice.id,
                apply={} if change is None else {change.name: change.value},
                gain_share=advice.gain,
            )
        )

    @property
    def _redone_share(self) -> float:
        return self._redone_s / max(time.monotonic() - self._started_s, self._redone_s, 1e-9)

    def _pressure_share(self) -> float | None:
        """Return the share of the time since the last look in which the host waited for memory."""
        at_s, waited_s = self._pressure
        now = time.monotonic(), memory_waited_s()
        self._pressure = now
        if now[1] is None or waited_s is None or now[0] <= at_s:
            return None
        return (now[1] - waited_s) / (now[0] - at_s)


def _is_news(advice: Advice, known: Advice | None) -> bool:
    if known is None or (advice.change, advice.setting) != (known.change, known.setting):
        return True
    return abs(advice.gain - known.gain) >= _SAME_GAIN
