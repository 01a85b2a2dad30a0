"""Writes the trainer's events to the journal, then to the live pipe, without waiting for readers.

`seq` counts journal frames. A lifecycle event always takes the next number. A gauge takes one only
when it is journaled, at most once a second per kind and before the run's end; a gauge that is only
live carries the number of the newest journal frame. So the journal has no gap, and a reader that
goes from the journal to the pipe drops lifecycle frames whose `seq` it has seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fluxtrain.errors import FluxTrainError, NoSpace
from fluxtrain.events.events import (
    Done,
    Event,
    Failed,
    Gauge,
    Heartbeat,
    LogWritten,
    PhaseChanged,
    RunPhase,
    StepFinished,
)
from fluxtrain.events.frames import encode_frame
from fluxtrain.events.journal import JournalWriter
from fluxtrain.events.live import LivePipe

JOURNAL_GAUGE_PERIOD_S = 1.0


class Emitter:
    """Stamps events and writes them, from any thread.

    If the journal cannot be written (the disk is full), the thread that made the emitter gets one
    error: its next lifecycle `emit` raises `NoSpace` (or `BadInput`), after the event is written to
    the live pipe. Later events, and events of other threads, do not raise, so that the run can
    still report its end; `journal_lost` counts what the journal lacks. A successful write resets
    this.
    """

    def __init__(
        self,
        journal_path: Path | None,
        live_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = None if live_fd is None else LivePipe(live_fd)
        self._journal = None if journal_path is None else JournalWriter(journal_path)
        self._clock = clock
        self._seq = self._journal.last_seq if self._journal else 0
        self._gauge_due_s: dict[type[Event], float] = {}
        self._held: dict[type[Event], tuple[Event, float]] = {}  # newer than those in the journal
        self._owner = threading.get_ident()
        self._owner_knows = False
        self._lock = threading.Lock()
        self._closed = False
        self.journal_lost = 0

    @property
    def dropped(self) -> int:
        """Return the number of live frames that the reader did not get."""
        return self._live.dropped if self._live else 0

    @property
    def seq(self) -> int:
        """Return the number of the newest journal frame."""
        return self._seq

    def emit(self, event: Event) -> None:
        """Stamp and write one event in microseconds, even if the reader is slow; after `close` do
        nothing."""
        with self._lock:
            if not self._closed:
                self._put(event)

    def journal_again(self, event: Event) -> None:
        """Write to the journal alone an event that `emit` raised for. Raises as `emit` did."""
        with self._lock:
            if self._closed:
                return
            failure = self._append(self._stamp(event, self._clock(), self._seq + 1))
            if failure is not None:
                raise failure
            self._seq += 1

    def close(self) -> None:
        """Write to the pipe as much as fits, then close the journal and the pipe."""
        with self._lock:
            self._closed = True
            if self._live:
                self._live.flush()
                self._live.close()
            if self._journal:
                self._journal.close()

    def _put(self, event: Event) -> None:
        now_s, kind = self._clock(), type(event)
        if isinstance(event, Gauge):
            kept = now_s >= self._gauge_due_s.get(kind, now_s)
            failure = self._write(event, now_s, kept, gauge=kind)
            if kept and failure is None:
                self._gauge_due_s[kind] = now_s + JOURNAL_GAUGE_PERIOD_S
            self._held.pop(kind, None)
            if not kept:
                self._held[kind] = (event, now_s)
            return
        if isinstance(event, Done | Failed):
            self._journal_held()
        failure = self._write(event, now_s, kept=True)
        if failure is not None:
            self._report(failure)

    def _write(
        self, event: Event, now_s: float, kept: bool, gauge: type | None = None
    ) -> FluxTrainError | None:
        frame = self._stamp(event, now_s, self._seq + kept)
        failure = self._append(frame) if kept else None
        if failure is not None:
            frame = self._stamp(event, now_s, self._seq)  # the number is still free
        elif kept:
            self._seq += 1
        if self._live:
            self._live.send(frame, gauge)
        return failure

    def _journal_held(self) -> None:
        """Write the last sample of every gauge, with which a finished run's journal ends."""
        for event, sampled_s in self._held.values():
            if self._append(self._stamp(event, sampled_s, self._seq + 1)) is None:
                self._seq += 1
        self._held.clear()

    def _stamp(self, event: Event, now_s: float, seq: int) -> bytes:
        return encode_frame(
            replace(event, seq=seq, t_s=now_s, wall_s=time.time(), dropped=self.dropped)
        )

    def _append(self, frame: bytes) -> FluxTrainError | None:
        if self._journal is None:
            return None
        try:
            self._journal.append(frame)
        except FluxTrainError as failure:
            self.journal_lost += 1
            return failure
        self._owner_knows = False
        return None

    def _report(self, failure: FluxTrainError) -> None:
        if threading.get_ident() == self._owner and not self._owner_knows:
            self._owner_knows = True
            raise failure


class Announcer:
    """Emits events, shows them on the console, and knows the phase and step for heartbeats."""

    def __init__(self, emitter: Emitter, show: Callable[[Event], None]) -> None:
        self._emitter = emitter
        self._show = show
        self._listeners: list[Callable[[Event], None]] = []
        self._phase: RunPhase = "starting"
        self._step = 0
        self._rewrite: Callable[[Callable[[], None]], None] | None = None

    @property
    def current_phase(self) -> RunPhase:
        """Return the phase that was reported last."""
        return self._phase

    def rewrites_with(self, rewrite: Callable[[Callable[[], None]], None]) -> None:
        """Let `rewrite` repeat the writing of an event that the journal's full disk refused."""
        self._rewrite = rewrite

    def also_tell(self, listener: Callable[[Event], None]) -> None:
        """Give all events from now on to `listener` too, which must neither block nor raise."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Write a lifecycle event. Raises NoSpace once when the journal's disk is full and the
        function given to `rewrites_with` did not help."""
        if isinstance(event, StepFinished):
            self._step = event.step
        self._show(event)
        for listener in self._listeners:
            listener(event)
        try:
            self._emitter.emit(event)
        except NoSpace:
            if self._rewrite is None:
                raise
            self._rewrite(lambda: self._emitter.journal_again(event))

    def gauge(self, event: Event) -> None:
        """Write a sample; never shown on the console, never raises for a full disk."""
        for listener in self._listeners:
            listener(event)
        self._emitter.emit(event)

    def phase(self, phase: RunPhase, detail: str = "") -> None:
        """Report that the run entered another phase."""
        self._phase = phase
        self.emit(PhaseChanged(phase=phase, detail=detail))

    def warn(self, text: str) -> None:
        """Report something that the user should know and that does not stop the run."""
        self.emit(LogWritten(level="warning", text=text))

    def at_step(self, step: int) -> None:
        """Note the step that a resumed run starts from."""
        self._step = step

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat event of this moment."""
        return Heartbeat(phase=self._phase, step=self._step)
