"""Writes the trainer's events to the journal, then to the live pipe, without waiting for readers.

`seq` counts journal frames. A lifecycle event always takes the next number. A gauge takes one only
when it is journaled, at most once a second per kind and before the run's end; a gauge that is only
live carries the number of the newest journal frame. So the journal has no gap, and a reader that
goes from the journal to the pipe drops lifecycle frames whose `seq` it has seen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.events import Done, Event, Failed, Gauge
from fluxtrain.events.frames import encode_frame
from fluxtrain.events.journal import JournalWriter
from fluxtrain.events.live import LivePipe

JOURNAL_GAUGE_PERIOD_S = 1.0


class Emitter:
    """Stamps events and writes them. Thread safe, also when a signal handler interrupts `emit`.

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
        self._lock = threading.RLock()
        self._waiting: deque[Event] = deque()
        self._emitting = False
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
            self._waiting.append(event)
            if self._emitting or self._closed:
                return  # called by a signal handler: the interrupted call writes it
            self._emitting = True
            try:
                while self._waiting:
                    self._put(self._waiting.popleft())
            finally:
                self._emitting = False

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
        """Write to the pipe what it has room for, then close the journal and the pipe."""
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
