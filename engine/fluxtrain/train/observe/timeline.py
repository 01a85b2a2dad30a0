"""Cuts the notes of a recorder at the borders of steps, and writes the lanes of each step into the
run's ring while it trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fluxtrain.core.device.recorder import Border, Note, Recorder
from fluxtrain.errors import BadInput
from fluxtrain.events.trace.lanes import OTHER_CARDS, Interval, StepLanes
from fluxtrain.events.trace.ring import RingWriter

_SHORTEST_WAIT_S = 20e-6  # for another card: less is the time between the two notes
_NEAR_S, _NEAR_SHARE = 100e-6, 0.1  # by which a GPU that keeps up with its host may be behind it
_SAME_RUN_S = 1e-3  # between two intervals that are told as one
_MOST_WAITING = 8  # ended steps; beyond that the oldest is cut without times that are still unknown


@dataclass(frozen=True, slots=True)
class _Known:
    """An interval in host seconds."""

    lane: str
    kind: str
    name: str
    start_s: float
    stop_s: float
    card: int


class StepCutter:
    """Makes `StepLanes` of a recorder's notes; used by one thread, which never waits here.

    A step is ready when its end and everything noted before its end have passed. An interval that
    begins before the end and goes on after it is in both steps, cut at the border.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._clocks = recorder.clocks
        self._end_s: float | None = None  # when the next border passed, once known
        self._open: list[Note] = []  # times not known yet
        self._known: list[_Known] = []
        self._queued: dict[int, _Known] = {}  # by card: the last run of work that came too late
        self._step: Border | None = None  # under way
        self._begin_s = 0.0
        self._wall_less_host_s: float | None = None  # so that steps follow each other exactly
        self._dropped = 0
        self._late = 0

    def ready(self, *, final: bool = False) -> list[StepLanes]:
        """Return the steps that became ready since the last call. `final`: drop what is not yet
        known."""
        steps: list[StepLanes] = []
        notes = self._recorder.notes
        while notes:
            note = notes[0]
            if isinstance(note, Note):
                self._open.append(notes.popleft())  # type: ignore[arg-type]
                continue
            self._learn()
            if self._waits(final=final):
                return steps
            if self._end_s is None:
                self._end_s = self._anchored(note)
                if self._end_s is None:
                    return steps
                self._take_what_began_before(self._end_s)
                if self._waits(final=final):
                    return steps
            at_s, self._end_s = self._end_s, None
            notes.popleft()
            if self._wall_less_host_s is None:
                self._wall_less_host_s = note.wall_s - note.noted_s
            self._late += len(self._open)
            self._open = []
            if self._step is not None:
                steps.append(self._cut(self._step, at_s))
            else:
                self._known, self._queued = [], {}
            self._step, self._begin_s = (note, at_s) if note.step else (None, at_s)
        self._learn()
        return steps

    def _anchored(self, border: Border) -> float | None:
        """Measure later times from a border, on every card; return the host seconds at which the
        first card came to it, None until all did."""
        first, *others = zip(self._clocks, (border, *border.others), strict=True)
        if not all(clock.passed(one) for clock, one in (first, *others)):
            return None
        for clock, one in others:
            clock.anchor_at(one)
        return first[0].anchor_at(border)

    def _waits(self, *, final: bool) -> bool:
        """Return whether times of the oldest step are unknown and may still be waited for."""
        if final or not self._open:
            return False
        return sum(isinstance(n, Border) for n in list(self._recorder.notes)) <= _MOST_WAITING

    def _take_what_began_before(self, end_s: float) -> None:
        """Take notes behind the border that began before it passed on the GPU: other threads and
        copies do not wait for the border."""
        if self._step is None:
            return
        notes, stay = self._recorder.notes, []
        for note in [notes.popleft() for _ in range(len(notes))]:  # other threads append meanwhile
            start_s = self._began_s(note) if isinstance(note, Note) else None
            if isinstance(note, Note) and start_s is not None and start_s < end_s:
                self._open.append(note)
            else:
                stay.append(note)
        notes.extendleft(reversed(stay))
        self._learn()

    def _began_s(self, note: Note) -> float | None:
        """Return the host seconds of its beginning; None if it has not begun."""
        if note.copy is None:
            return self._clocks[note.card].seconds(note.start)
        instants = None if note.copy.failed() else note.copy.instants()
        return None if instants is None else self._clocks[note.card].seconds(instants[0])

    def _learn(self) -> None:
        """Move the notes whose times are known now to the known intervals."""
        if self._step is None:
            self._open = []  # noted by a thread that was late to see the end of its step
            return
        waiting: list[Note] = []
        for note in self._open:
            if not self._learned(note):
                waiting.append(note)
        self._open = waiting

    def _learned(self, note: Note) -> bool:
        """Return whether all times of this note are known."""
        start, stop = note.start, note.stop
        if note.copy is not None:
            if note.copy.failed():
                return True
            instants = note.copy.instants()
            if instants is None:
                return False
            start, stop = instants
        if stop is None:
            return False
        clock = self._clocks[note.card]
        stop_s, start_s = clock.seconds(stop), clock.seconds(start)
        if start_s is None or stop_s is None:
            return False
        if note.kind != OTHER_CARDS or stop_s - start_s >= _SHORTEST_WAIT_S:
            stop_s = max(start_s, stop_s)
            self._known.append(_Known(note.lane, note.kind, note.name, start_s, stop_s, note.card))
            if note.lane == "gpu" and note.name:
                self._see_queueing(note, start_s, stop_s)
        if note.pooled:
            clock.give_back(start)
            clock.give_back(stop)
        return True

    def _see_queueing(self, note: Note, start_s: float, stop_s: float) -> None:
        """Note where a GPU computed only as fast as its host queued the work: at the end it had
        nothing left to do, and it took as long as the host did."""
        clock = self._clocks[note.card]
        queued_s, all_queued_s = clock.queued_s(note.start), clock.queued_s(note.stop)
        if queued_s is None or all_queued_s is None:
            return
        length_s = stop_s - start_s
        near_s = max(_NEAR_S, _NEAR_SHARE * length_s)
        if stop_s - all_queued_s > near_s or abs(all_queued_s - queued_s - length_s) > near_s:
            return
        last = self._queued.get(note.card)
        if last is not None and last.kind == note.kind and start_s - last.stop_s < _SAME_RUN_S:
            self._queued[note.card] = replace(last, stop_s=stop_s)
            return
        if last is not None:
            self._known.append(last)
        self._queued[note.card] = _Known("queue", note.kind, "", start_s, stop_s, note.card)

    def _cut(self, border: Border, end_s: float) -> StepLanes:
        """Cut the step that ends at `end_s`; keep intervals that go on for the next step."""
        begin_s, intervals, later = self._begin_s, [], []
        self._known += self._queued.values()
        self._queued = {}
        for one in self._known:
            if one.stop_s <= begin_s and one.start_s < begin_s:
                self._late += 1
                continue
            if one.start_s < end_s:
                start_s = max(one.start_s, begin_s)
                intervals.append(
                    Interval(
                        one.lane, one.kind, one.name, start_s - begin_s,
                        min(one.stop_s, end_s) - start_s,
                        began_before=one.start_s < begin_s, goes_on=one.stop_s > end_s,
                        card=one.card,
                    )
                )  # fmt: skip
            if one.stop_s > end_s:
                later.append(one)
        self._known = later
        dropped, self._dropped = self._recorder.dropped - self._dropped, self._recorder.dropped
        late, self._late = self._late, 0
        return StepLanes(
            step=border.step, wall_s=begin_s + (self._wall_less_host_s or 0.0),
            length_s=max(0.0, end_s - begin_s), intervals=intervals, late=late, dropped=dropped,
        )  # fmt: skip


PERIOD_S = 0.25
RECENT_STEPS = 20
_LAST_WORDS_S = 2.0  # work that the device has not done by then is left out


class TimelineThread:
    """Runs between `watch` and `close`; the trainer's own threads never wait for it.

    A ring that cannot be written is reported once; the run goes on without it.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._recorder: Recorder | None = None
        self._cutter: StepCutter | None = None
        self._ring: RingWriter | None = None
        self.recent: deque[StepLanes] = deque(maxlen=RECENT_STEPS)  # read by any thread
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def watch(self, recorder: Recorder) -> None:
        """Write the notes of `recorder` from now on."""
        self._recorder = recorder
        try:
            self._ring = RingWriter(self.path)
        except (OSError, BadInput) as error:
            self._give_up(error)
            return
        self._cutter = StepCutter(recorder)
        self._thread.start()

    def close(self) -> None:
        """Write the remaining steps; the ring ends with the last whole step."""
        if self._recorder is None or self._ring is None or self._stopped.is_set():
            return
        self._recorder.end_step()
        self._stopped.set()
        if self._thread.ident is not None:  # the system may have refused another thread
            self._thread.join()
        until_s = time.monotonic() + _LAST_WORDS_S
        while self._recorder.notes and time.monotonic() < until_s:
            self._keep()
            time.sleep(0.001)
        self._keep(final=True)
        self._recorder.stop()
        if self._ring is not None:
            self._ring.close()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._keep()

    def _keep(self, *, final: bool = False) -> None:
        if self._cutter is None or self._ring is None:
            return
        try:
            for step in self._cutter.ready(final=final):
                self._ring.write(step)
                self.recent.append(step)
        except Exception as error:  # noqa: BLE001 - what watches a training must not end it
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError | BadInput):
            why = getattr(error, "strerror", None) or str(error)
        self._warn(f"the step timeline is not kept: {self.path.name}: {why}; the training goes on")
