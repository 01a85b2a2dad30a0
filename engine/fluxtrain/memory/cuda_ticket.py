"""A copy that is queued on a CUDA stream: events tell when it began and ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch

from fluxtrain.memory.current_stream import CurrentStream
from fluxtrain.memory.recorder import Instant
from fluxtrain.memory.stalls import Stalls


class CudaTicket:
    """A `Ticket` of a copy that is queued on a stream, now or later."""

    def __init__(self, stalls: Stalls, current: CurrentStream) -> None:
        self._stalls, self._current = stalls, current
        self._issued = threading.Event()
        self._arrived = False  # as was seen: whoever asks the driver again lets other threads go on
        self._start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self._error: BaseException | None = None

    def issue(
        self, stream: torch.cuda.Stream, copy: Callable[[], None],
        behind: Iterable[torch.cuda.Event] = (),
    ) -> None:  # fmt: skip
        """Queue it on `stream` behind these events; what goes wrong there, the ticket tells too."""
        try:
            with torch.cuda.stream(stream):
                for event in behind:
                    stream.wait_event(event)
                self._start.record(stream)
                copy()
                self.end.record(stream)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._issued.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._issued.set()

    @property
    def duration_s(self) -> float | None:
        return self._start.elapsed_time(self.end) / 1e3 if self.done() else None

    def _has_arrived(self) -> bool:
        """Of a copy that was issued."""
        if not self._arrived:
            self._arrived = bool(self.end.query())
        return self._arrived

    def instants(self) -> tuple[Instant, Instant] | None:
        return (self._start, self.end) if self._issued.is_set() else None

    def done(self) -> bool:
        return self._issued.is_set() and self._error is None and self._has_arrived()

    def failed(self) -> bool:
        return self._issued.is_set() and self._error is not None

    def wait_host(self) -> None:
        self._wait_issued()
        if not self._arrived:
            self.end.synchronize()
            self._arrived = True

    def wait_compute(self, cause: str) -> None:
        if not self._issued.is_set():
            started_s = time.perf_counter()
            self._wait_issued()
            self._stalls.add("update", time.perf_counter() - started_s)
        self._wait_issued()
        if self._has_arrived():
            return
        stream = self._current()
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self.end)
        after.record(stream)
        self._stalls.add_events(cause, before, after)

    def _wait_issued(self) -> None:
        if not self._issued.is_set():  # a look takes no lock
            self._issued.wait()
        if self._error is not None:
            raise self._error
