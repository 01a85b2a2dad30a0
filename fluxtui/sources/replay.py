"""Plays a finished run back from its journal, at its own speed or all at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fluxtrain.events.events import AnyEvent
from fluxtrain.events.printable import printable
from fluxtrain.events.reader import JournalFollower, SchemaTooNew
from fluxtui.sources.source import EventBatch
from fluxtui.state.freshness import SteadyClock
from fluxtui.state.status import Link

POLL_EVENTS = 5000


def _steady(events: list[AnyEvent]) -> list[AnyEvent]:
    """Return the events with the times by which they are played, whatever the clock did."""
    clock, played = SteadyClock(), []
    for event in events:
        clock = clock.after(event)
        steady_s = clock.time_of(event)
        played.append(event if steady_s == event.wall_s else replace(event, wall_s=steady_s))
    return played


class ReplaySource:
    """Events of `journal` at `speed` times the pace they were written; None is all at once."""

    def __init__(
        self,
        journal: Path,
        speed: float | None = 1.0,
        until_share: float | None = None,
        from_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = journal
        self._speed = speed
        self._until_share = until_share  # of the run's time, None for all of it
        self._from_s = from_s  # what came before is given at once
        self._clock = clock
        self._events: list[AnyEvent] = []
        self._next = 0
        self._started_s: float | None = None
        self._problem: str | None = None

    @property
    def run_dir(self) -> Path | None:
        return self._path.parent

    @property
    def controllable(self) -> bool:
        return False

    def poll(self) -> EventBatch:
        """Return the events that are due."""
        if self._started_s is None:
            self._read()
        start = self._next
        limit = min(len(self._events), start + POLL_EVENTS)
        due_s = self._due_s()
        while self._next < limit and self._events[self._next].wall_s <= due_s:
            self._next += 1
        whole = self.over and self._until_share is None
        link = Link(run_dir=self._path.parent, replay=True, over=whole, problem=self._problem)
        return EventBatch(self._events[start : self._next], link, more=self._next == limit > start)

    def close(self) -> None:
        """Do nothing, as nothing is open."""

    @property
    def over(self) -> bool:
        """Return whether all events were given."""
        return self._started_s is not None and self._next >= len(self._events)

    def _read(self) -> None:
        self._started_s = self._clock()
        try:
            self._events = _steady(JournalFollower(self._path, follow=True).read_all())
        except SchemaTooNew as error:
            self._problem = printable(str(error))
        except OSError as error:
            self._problem = printable(f"{self._path} cannot be read: {error.strerror or error}")
        if self._until_share is not None and self._events:
            first_s, last_s = self._events[0].wall_s, self._events[-1].wall_s
            end_s = first_s + (last_s - first_s) * self._until_share
            self._events = [event for event in self._events if event.wall_s <= end_s]

    def _due_s(self) -> float:
        if self._speed is None or not self._events or self._started_s is None:
            return float("inf")
        played_s = (self._clock() - self._started_s) * self._speed
        return self._events[0].wall_s + self._from_s + played_s
