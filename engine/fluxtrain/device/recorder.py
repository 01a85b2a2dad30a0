"""Notes what streams and threads do and when, at almost no cost to them.

Whoever works notes two instants: host seconds, or CUDA events that nobody waits for. A `StepCutter`
on another thread learns their times once they have passed, and cuts them at the borders of steps.
Outside `begin_step` and `end_step` nothing is noted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Instant = Any  # host seconds (time.perf_counter), or a torch.cuda.Event

_MOST_NOTES = 32768  # waiting for the cutter; what comes beyond is counted and left out


class Passing(Protocol):
    """A copy whose instants are known later."""

    def instants(self) -> tuple[Instant, Instant] | None:
        """When it began and ended; None until it was issued (on CPU: made)."""

    def failed(self) -> bool:
        """True when it was never made."""


@dataclass(eq=False, slots=True)
class Note:
    """One interval; `stop` is None while it goes on, and `copy` knows both where it is set."""

    lane: str
    kind: str
    name: str
    start: Instant = None
    stop: Instant = None
    copy: Passing | None = None
    pooled: bool = False  # its events go back to the clock


@dataclass(eq=False, slots=True)
class Border:
    """Where a step begins (`step` > 0), or where the recording pauses."""

    step: int
    instant: Instant
    noted_s: float  # host seconds when it was noted: it has not passed before
    wall_s: float
    seen_s: float | None = None  # when it was first seen to have passed


class HostClock:
    """Instants are host seconds."""

    on_host = True

    def instant(self) -> Instant:
        """Now, in the computation."""
        return time.perf_counter()

    def border(self, step: int) -> Border:
        """Now, as the border of a step."""
        now_s = time.perf_counter()
        return Border(step, now_s, now_s, time.time(), now_s)

    def seconds(self, instant: Instant) -> float | None:
        """Host seconds of an instant; None while it has not passed."""
        return float(instant)

    def anchor_at(self, border: Border) -> float | None:
        """Host seconds of a border."""
        return float(border.instant)

    def give_back(self, instant: Instant) -> None:
        """Nothing to use again."""


class CudaClock:
    """Instants are timing events on the computation's stream, taken from a pool.

    An event's time is that of the step's border plus what the GPU measured between the two. A
    border's is that of the border before plus the same, held between the host times at which it
    was recorded and first seen to have passed, so that the two clocks cannot drift apart.
    """

    on_host = False

    def __init__(self, current: Callable[[], torch.cuda.Stream]) -> None:
        self._current = current  # the stream that the calling thread queues the computation on
        self._pool: list[torch.cuda.Event] = []
        self._unseen: Border | None = None
        self._anchor: torch.cuda.Event | None = None
        self._anchor_s = 0.0

    def instant(self) -> Instant:
        """This point of the computation."""
        border = self._unseen
        if border is not None and border.instant.query():
            border.seen_s, self._unseen = time.perf_counter(), None
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._current())
        return event

    def border(self, step: int) -> Border:
        """This point of the computation, as the border of a step."""
        noted_s = time.perf_counter()
        border = Border(step, self.instant(), noted_s, time.time())
        self._unseen = border
        return border

    def seconds(self, instant: Instant) -> float | None:
        """Host seconds of an event or of a host time; None while it has not passed."""
        if isinstance(instant, float):
            return instant
        if self._anchor is None or not instant.query():
            return None
        return self._anchor_s + float(self._anchor.elapsed_time(instant)) / 1e3

    def anchor_at(self, border: Border) -> float | None:
        """Host seconds of a border, which later events are measured from; None until it passed."""
        if not border.instant.query():
            return None
        at_s = border.noted_s
        if self._anchor is not None:
            at_s = max(at_s, self._anchor_s + self._anchor.elapsed_time(border.instant) / 1e3)
            self._pool.append(self._anchor)
        if border.seen_s is not None:
            at_s = min(at_s, border.seen_s)
        self._anchor, self._anchor_s = border.instant, at_s
        return at_s

    def give_back(self, instant: Instant) -> None:
        """The event may be recorded again."""
        if not isinstance(instant, float):
            self._pool.append(instant)


class Recorder:
    """Notes of one device. Any thread may note; `Device.recorder` is where the engine finds it."""

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self.clock = clock
        self.notes: deque[Note | Border] = deque()
        self.recording = False
        self.dropped = 0  # notes that found no room
        self._stopped = False

    def stop(self) -> None:
        """Nobody reads the notes any more: none is made from now on."""
        self._stopped, self.recording = True, False
        self.notes.clear()

    def begin_step(self, step: int) -> None:
        """Step `step` (from 1) begins; the one before ends."""
        if self._stopped:
            return
        self.recording = True
        self.notes.append(self.clock.border(step))

    def end_step(self) -> None:
        """The step under way ends, and nothing is noted until the next one begins."""
        if self.recording:
            self.recording = False
            self.notes.append(self.clock.border(0))

    def instant(self) -> Instant:
        """This point of the computation, for `computed`; None while nothing is noted."""
        return self.clock.instant() if self.recording else None

    def computed(self, kind: str, name: str, start: Instant) -> None:
        """The computation did this since `start`."""
        if start is not None and self.recording:
            self._add(Note("gpu", kind, name, start, self.clock.instant(), pooled=True))

    def copied(self, lane: str, kind: str, name: str, copy: Passing) -> None:
        """A copy was asked for."""
        if self.recording:
            self._add(Note(lane, kind, name, copy=copy))

    def stalled(self, cause: str, before: Instant, after: Instant) -> None:
        """The computation waited between two of its instants."""
        if self.recording:
            self._add(Note("stall", cause, "", before, after))

    def host_waited(self, cause: str, seconds: float) -> None:
        """The thread that drives the computation waited until now; on CPU it is the computation."""
        if self.recording:
            now_s = time.perf_counter()
            lane = "stall" if self.clock.on_host else "host"
            self._add(Note(lane, cause, "", now_s - seconds, now_s))

    def host_did(self, kind: str, start_s: float, stop_s: float) -> None:
        """The thread that drives the computation was in this phase."""
        if self.recording:
            self._add(Note("host", kind, "", start_s, stop_s))

    @contextmanager
    def working(self, lane: str, kind: str, name: str) -> Iterator[None]:
        """A thread of the host works on this inside."""
        note = Note(lane, kind, name, time.perf_counter())
        if self.recording:
            self._add(note)
        try:
            yield
        finally:
            note.stop = time.perf_counter()

    @contextmanager
    def as_one(self, kind: str) -> Iterator[None]:
        """What the computation does inside is one interval, without its parts."""
        start, recording = self.instant(), self.recording
        self.recording = False
        try:
            yield
        finally:
            self.recording = recording
            self.computed(kind, "", start)

    def _add(self, note: Note) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(note)
        else:
            self.dropped += 1
