"""Record what streams and threads do and when, at almost no cost to them.

Each interval is noted with two instants: host seconds, or CUDA events that nothing waits for. A
`StepCutter` on another thread reads their times once they have passed, and cuts the intervals at
the borders of steps. Outside `begin_step` and `end_step` nothing is noted.

Of several cards the first one's recorder leads: the others note into its notes, each by the clock
of its own card, because no time is known between events of two GPUs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Instant = Any  # host seconds (time.perf_counter), or a torch.cuda.Event

_MOST_NOTES = 32768  # waiting for the cutter; further ones are counted and dropped


class Passing(Protocol):
    """A copy whose instants are known later."""

    def instants(self) -> tuple[Instant, Instant] | None:
        """Return when the copy began and ended; None until it was issued (on CPU: made)."""

    def failed(self) -> bool:
        """Return whether the copy was never made."""


@dataclass(eq=False, slots=True)
class Note:
    """One interval; `stop` is None until it ends. `copy`, where set, has both instants."""

    lane: str
    kind: str
    name: str
    start: Instant = None
    stop: Instant = None
    copy: Passing | None = None
    pooled: bool = False  # its events go back to the clock
    card: int = 0  # whose clock its instants are of; 0 also for what the host does


@dataclass(eq=False, slots=True)
class Border:
    """Where a step begins (`step` > 0), or where the recording pauses."""

    step: int
    instant: Instant
    noted_s: float  # host seconds when it was noted: it has not passed before
    wall_s: float
    seen_s: float | None = None  # when it was first seen to have passed
    others: tuple[Border, ...] = ()  # the same border on further cards, in their order


class HostClock:
    """Instants are host seconds."""

    on_host = True

    def instant(self) -> Instant:
        """Return the present instant."""
        return time.perf_counter()

    def border(self, step: int) -> Border:
        """Return the present instant as the border of a step."""
        now_s = time.perf_counter()
        return Border(step, now_s, now_s, time.time(), now_s)

    def seconds(self, instant: Instant) -> float | None:
        """Return the host seconds of an instant."""
        return float(instant)

    def queued_s(self, instant: Instant) -> float | None:
        """Return None: host work is not queued."""
        return None

    def passed(self, border: Border) -> bool:
        """Return True: a border is noted when it is reached."""
        return True

    def anchor_at(self, border: Border) -> float | None:
        """Return the host seconds of a border."""
        return float(border.instant)

    def give_back(self, instant: Instant) -> None:
        """Do nothing: host seconds are not pooled."""


class CudaClock:
    """Instants are timing events on the computation's stream, taken from a pool.

    An event's time is the time of the step's border plus the interval that the GPU measured between
    the two. A border's time is computed from the border before in the same way, and clamped between
    the host times when it was recorded and first seen to have passed, so that the two clocks cannot
    drift apart.
    """

    on_host = False

    def __init__(self, current: Callable[[], torch.cuda.Stream]) -> None:
        self._current = current  # the stream that the calling thread queues the computation on
        self._pool: list[torch.cuda.Event] = []
        self._unseen: Border | None = None
        self._anchor: torch.cuda.Event | None = None
        self._anchor_s = 0.0

    def instant(self) -> Instant:
        """Return this point of the computation."""
        border = self._unseen
        if border is not None and border.instant.query():
            border.seen_s, self._unseen = time.perf_counter(), None
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._current())
        event.queued_s = time.perf_counter()  # type: ignore[attr-defined]
        return event

    def border(self, step: int) -> Border:
        """Return this point of the computation as the border of a step."""
        noted_s = time.perf_counter()
        border = Border(step, self.instant(), noted_s, time.time())
        self._unseen = border
        return border

    def seconds(self, instant: Instant) -> float | None:
        """Return the host seconds of an event or of a host time; None while it has not passed."""
        if isinstance(instant, float):
            return instant
        if self._anchor is None or not instant.query():
            return None
        return self._anchor_s + float(self._anchor.elapsed_time(instant)) / 1e3

    def queued_s(self, instant: Instant) -> float | None:
        """Return the host seconds when `instant` made it; None for other instants."""
        return getattr(instant, "queued_s", None)

    def passed(self, border: Border) -> bool:
        """Return whether the computation has come to a border."""
        return bool(border.instant.query())

    def anchor_at(self, border: Border) -> float | None:
        """Measure later events from this border; return its host seconds, None until it passed."""
        if not self.passed(border):
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
        """Return an event to the pool, to be recorded again."""
        if not isinstance(instant, float):
            self._pool.append(instant)


class Recorder:
    """Records the notes of one device (`Device.recorder`). Any thread may add notes."""

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self.clock = clock
        self.notes: deque[Note | Border] = deque()
        self.recording = False
        self.dropped = 0  # notes beyond the limit, of all cards
        self._card = 0
        self._leader = self
        self._followers: tuple[Recorder, ...] = ()
        self._stopped = False

    def lead(self, others: Sequence[Recorder]) -> None:
        """Record further cards too, in order; steps begin and end for all."""
        self._followers = tuple(others)
        for number, other in enumerate(others, 1):
            other._card, other._leader, other.notes = number, self, self.notes

    def of(self, card: int) -> Recorder:
        """Return the recorder of a card: this one, or one that it leads."""
        return self._followers[card - 1] if card else self

    @property
    def clocks(self) -> tuple[HostClock | CudaClock, ...]:
        """Return the clocks of all cards with notes here, in order."""
        return (self.clock, *(other.clock for other in self._followers))

    def stop(self) -> None:
        """Record nothing more: no reader is left."""
        self._stopped = True
        self._record(on=False)
        self.notes.clear()

    def begin_step(self, step: int) -> None:
        """Begin step `step` (from 1) and end the one before."""
        if self._stopped:
            return
        self._record(on=True)
        self.notes.append(self._border(step))

    def end_step(self) -> None:
        """End the step under way; nothing is noted until the next one begins."""
        if self.recording:
            self._record(on=False)
            self.notes.append(self._border(0))

    def _border(self, step: int) -> Border:
        border = self.clock.border(step)
        border.others = tuple(other.clock.border(step) for other in self._followers)
        return border

    def _record(self, *, on: bool) -> None:
        for one in (self, *self._followers):
            one.recording = on

    def instant(self) -> Instant:
        """Return this point of the computation, for `computed`; None while nothing is noted."""
        return self.clock.instant() if self.recording else None

    def computed(self, kind: str, name: str, start: Instant) -> None:
        """Note what the computation did since `start`."""
        if start is not None and self.recording:
            self._add(
                Note("gpu", kind, name, start, self.clock.instant(), pooled=True, card=self._card)
            )

    def copied(self, lane: str, kind: str, name: str, copy: Passing) -> None:
        """Note a copy that was queued."""
        if self.recording:
            self._add(Note(lane, kind, name, copy=copy, card=self._card))

    def stalled(self, cause: str, before: Instant, after: Instant) -> None:
        """Note that the computation waited between two of its instants."""
        if self.recording:
            self._add(Note("stall", cause, "", before, after, card=self._card))

    def waited(self, cause: str, start: Instant) -> None:
        """Note that the computation waited since `start`, which `instant` gave."""
        if start is not None and self.recording:
            now = self.clock.instant()
            self._add(Note("stall", cause, "", start, now, pooled=True, card=self._card))

    def host_waited(self, cause: str, seconds: float) -> None:
        """Note that the thread that drives the computation waited until now; on CPU that thread is
        the computation."""
        if self.recording:
            now_s = time.perf_counter()
            stalls = self.clock.on_host
            card = self._card if stalls else 0
            lane = "stall" if stalls else "host"
            self._add(Note(lane, cause, "", now_s - seconds, now_s, card=card))

    def host_did(self, kind: str, start_s: float, stop_s: float) -> None:
        """Note a phase of the thread that drives the computation."""
        if self.recording:
            self._add(Note("host", kind, "", start_s, stop_s))

    @contextmanager
    def working(self, lane: str, kind: str, name: str) -> Iterator[None]:
        """Note the work of a host thread inside the context."""
        note = Note(lane, kind, name, time.perf_counter())
        if self.recording:
            self._add(note)
        try:
            yield
        finally:
            note.stop = time.perf_counter()

    @contextmanager
    def as_one(self, kind: str) -> Iterator[None]:
        """Note all computation inside the context as one interval."""
        start, recording = self.instant(), self.recording
        self._record(on=False)
        try:
            yield
        finally:
            self._record(on=recording)
            self.computed(kind, "", start)

    def _add(self, note: Note) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(note)
        else:
            self._leader.dropped += 1


class Stalls:
    """Seconds that the computation waited, by cause; read and reset by `take`."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(HostClock())
        self._seconds: dict[str, float] = {}
        self._pairs: deque[tuple[str, Any, Any]] = deque()
        self._lock = threading.Lock()

    def add(self, cause: str, seconds: float) -> None:
        """Count `seconds` until now in which the thread that drives the computation waited."""
        self._recorder.host_waited(cause, seconds)
        self._book(cause, seconds)

    def add_host(self, cause: str, seconds: float) -> None:
        """Record that this thread waited. It counts as a stall only where the thread itself
        computes: a GPU may have continued meanwhile."""
        self._recorder.host_waited(cause, seconds)
        if self._recorder.clock.on_host:
            self._book(cause, seconds)

    def add_events(self, cause: str, before: Any, after: Any) -> None:
        """Count the time between two CUDA events once both have passed."""
        self._recorder.stalled(cause, before, after)
        self._pairs.append((cause, before, after))

    def take(self) -> dict[str, float]:
        """Return seconds by cause since the last call; later events stay for the next one."""
        while self._pairs and self._pairs[0][2].query():
            cause, before, after = self._pairs.popleft()
            self._book(cause, before.elapsed_time(after) / 1e3)
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken

    def _book(self, cause: str, seconds: float) -> None:
        with self._lock:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
