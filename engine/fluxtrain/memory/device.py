"""The two devices that blocks are computed on, and the copies to and from them.

On CUDA the copies run on two streams of their own, one a direction. On CPU the "device" is a
separate buffer and the copies run on two threads, so that streaming is exercised for real.
A `Ticket` is one copy under way; all waiting goes through it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fluxtrain.memory import page_locks
from fluxtrain.memory.current_stream import CurrentStream
from fluxtrain.memory.heap import Heap
from fluxtrain.memory.recorder import CudaClock, HostClock, Instant, Recorder
from fluxtrain.memory.staging import Staging, Wait, host_copy
from fluxtrain.memory.stalls import Stalls
from fluxtrain.memory.worker import Worker

Copy = Callable[[Tensor, Tensor], None]  # (to, from)


class Ticket(Protocol):
    """A copy under way."""

    @property
    def duration_s(self) -> float | None:
        """How long the copy took; None while it is not known."""

    def instants(self) -> tuple[Instant, Instant] | None:
        """When it began and ended, for the recorder; None until it was issued (on CPU: made)."""

    def done(self) -> bool:
        """True when the bytes have arrived."""

    def failed(self) -> bool:
        """True when the copy was never made, because the update it waited for failed."""

    def wait_host(self) -> None:
        """Block this thread until the bytes have arrived; raises what made the copy fail."""

    def wait_compute(self, cause: str) -> None:
        """Make the computation wait for the bytes; the wait is booked as a stall of `cause`."""


class Device(Protocol):
    """What the engine asks of a device."""

    torch_device: torch.device
    stalls: Stalls
    recorder: Recorder
    pins: bool  # host memory should be page-locked

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Ticket] = (), *, urgent: bool = False,
    ) -> Ticket:  # fmt: skip
        """Copy host `source` to device `to` once `after` is done, `free` has passed and the
        copies `follows` have arrived. urgent: not behind copies that still wait for theirs."""

    def download(self, to: Tensor, source: Tensor) -> Ticket:
        """Copy device `source` to host `to` once the computation so far is done."""

    def for_copies(self, memory: Tensor) -> Tensor:
        """The same device memory; given up, it serves others when copies under way have ended."""

    def mark(self) -> Any:
        """A point in the computation, for `upload(free=...)`."""

    def tidy(self) -> None:
        """Between two blocks: give back memory that is free and not going to be needed."""

    def close(self) -> None:
        """Finish the copies under way and end the threads."""


class _CpuTicket:
    def __init__(self, future: Future[tuple[float, float]], stalls: Stalls) -> None:
        self._future = future
        self._stalls = stalls

    @property
    def duration_s(self) -> float | None:
        found = self.instants()
        return None if found is None else found[1] - found[0]

    def instants(self) -> tuple[Instant, Instant] | None:
        return self._future.result() if self._future.done() and not self.failed() else None

    def done(self) -> bool:
        return self._future.done()

    def failed(self) -> bool:
        return self._future.done() and self._future.exception() is not None

    def wait_host(self) -> None:
        self._future.result()

    def wait_compute(self, cause: str) -> None:
        if self._future.done():
            self._future.result()
            return
        started_s = time.perf_counter()
        self._future.result()
        self._stalls.add(cause, time.perf_counter() - started_s)


class CpuDevice:
    """The host's own memory as a device; copies run on one thread a direction."""

    pins = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.recorder = Recorder(HostClock())
        self.stalls = Stalls(self.recorder)
        self._up = Worker("flux-upload")
        self._down = Worker("flux-download")
        self._staging = (Staging(), Staging()) if self.pins else None
        self._heap = Heap()

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Ticket] = (), *, urgent: bool = False,
    ) -> Ticket:  # fmt: skip
        def job() -> tuple[float, float]:
            if after is not None:
                after.result()
            for earlier in follows:
                earlier.wait_host()
            return _timed(copy, to, source)

        copy = self._copying(source, 0)
        if urgent and after is None and not follows:  # this thread is the computation's
            made: Future[tuple[float, float]] = Future()
            made.set_result(_timed(copy, to, source))
            return _CpuTicket(made, self.stalls)
        ticket = _CpuTicket(self._up.submit(job), self.stalls)
        if after is None:  # else it may wait for the thread that lets the memory go
            self._note(source, "h2d", self._up, ticket)
        return ticket

    def download(self, to: Tensor, source: Tensor) -> Ticket:
        work = partial(_timed, self._copying(to, 1), to, source)
        ticket = _CpuTicket(self._down.submit(work), self.stalls)
        self._note(to, "d2h", self._down, ticket)
        return ticket

    def _note(self, home: Tensor, way: str, worker: Worker, ticket: _CpuTicket) -> None:
        """Memory that is locked, as for a GPU, stays so until the copy has been made."""
        arena = page_locks.LOCKS.arena_of(home) if self.pins else None
        if arena is not None:
            arena.under_way[way] = partial(worker.unless_here, ticket.wait_host)

    def _copying(self, home: Tensor, way: int) -> Copy:
        """How to copy from (way 0) or to (1) host memory `home`."""
        if self._staging is None or page_locks.LOCKS.holds(home):
            return host_copy
        through = self._staging[way]
        return partial(through.down if way else through.up, send=_sent)

    def for_copies(self, memory: Tensor) -> Tensor:
        return memory  # whoever copies holds it

    def mark(self) -> None:
        return None

    def tidy(self) -> None:
        self._heap.tidy()

    def close(self) -> None:
        self._up.close()
        self._down.close()


def _timed(copy: Copy, to: Tensor, source: Tensor) -> tuple[float, float]:
    """Copy; when that began and ended."""
    started_s = time.perf_counter()
    copy(to, source)
    return started_s, time.perf_counter()


def _sent(to: Tensor, source: Tensor) -> Wait:
    """A copy that is made at once."""
    host_copy(to, source)
    return lambda: None


class _CudaTicket:
    def __init__(self, stalls: Stalls, current: CurrentStream) -> None:
        self._stalls, self._current = stalls, current
        self._issued = threading.Event()
        self._arrived = False  # as was seen: whoever asks the driver again lets other threads go on
        self._start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self._error: BaseException | None = None

    def issue(self, stream: torch.cuda.Stream, copy: Callable[[], None]) -> None:
        try:
            with torch.cuda.stream(stream):
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


class CudaDevice:
    """One NVIDIA GPU; copies run on two streams beside the computation's."""

    pins = True

    def __init__(self, torch_device: torch.device) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        self.torch_device = current if torch_device == torch.device("cuda") else torch_device
        self._current = CurrentStream(self.torch_device)
        self.recorder = Recorder(CudaClock(self.torch_device))
        self.stalls = Stalls(self.recorder)
        self._up = torch.cuda.Stream(self.torch_device)
        self._down = torch.cuda.Stream(self.torch_device)
        self._staging = (Staging(), Staging())  # now: later the system may refuse its page locks
        self._up_thread, self._down_thread = Worker("flux-staged-up"), Worker("flux-staged-down")

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Ticket] = (), *, urgent: bool = False,
    ) -> Ticket:  # fmt: skip
        ticket = _CudaTicket(self.stalls, self._current)
        if not (page_locks.LOCKS.holds(source) and all(map(_was_issued, follows))):
            work = partial(self._staged_up, ticket, to, source, after, free, follows)
            self._up_thread.submit(work)
            return ticket

        def issue(done: Future[None] | None) -> None:
            if done is not None and done.exception() is not None:
                ticket.fail(done.exception() or RuntimeError())
                return
            if free is not None:
                self._up.wait_event(free)
            for earlier in follows:
                if isinstance(earlier, _CudaTicket):
                    self._up.wait_event(earlier.end)
            _issue(ticket, self._up, to, source, home=source)

        if after is None or after.done():
            issue(after)
        else:
            after.add_done_callback(issue)
        return ticket

    def download(self, to: Tensor, source: Tensor) -> Ticket:
        ticket = _CudaTicket(self.stalls, self._current)
        if not page_locks.LOCKS.holds(to):
            work = partial(self._staged_down, ticket, to, source, self.mark())
            self._down_thread.submit(work)
            return ticket
        self._down.wait_event(self.mark())
        _issue(ticket, self._down, to, source, home=to)
        return ticket

    def _staged_up(
        self, ticket: _CudaTicket, to: Tensor, source: Tensor, after: Future[None] | None,
        free: Any, follows: Sequence[Ticket],
    ) -> None:  # fmt: skip
        """On a thread: from memory that is not page-locked, which is read here and now, or behind
        copies that go through threads."""
        try:
            if after is not None:
                after.result()
            for earlier in follows:
                earlier.wait_host()
        except BaseException as error:
            ticket.fail(error)
            raise
        if free is not None:
            self._up.wait_event(free)
        ticket.issue(self._up, lambda: self._staging[0].up(to, source, partial(_send, self._up)))

    def _staged_down(
        self, ticket: _CudaTicket, to: Tensor, source: Tensor, point: torch.cuda.Event
    ) -> None:
        """On a thread: to memory that is not page-locked; issued once the bytes are there."""
        self._down.wait_event(point)
        send = partial(_send, self._down)
        ticket.issue(self._down, lambda: self._staging[1].down(to, source, send))

    def for_copies(self, memory: Tensor) -> Tensor:
        for stream in (self._up, self._down):
            memory.record_stream(stream)
        return memory

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._current())
        return event

    def tidy(self) -> None:
        return None  # torch's allocator of device memory reuses what is free

    def close(self) -> None:
        self._up_thread.close()
        self._down_thread.close()
        self._up.synchronize()
        self._down.synchronize()


def _was_issued(ticket: Ticket) -> bool:
    """Is it on a stream, so that streams can wait for it?"""
    return ticket.instants() is not None


def _issue(
    ticket: _CudaTicket, stream: torch.cuda.Stream, to: Tensor, source: Tensor, *, home: Tensor
) -> None:
    """Queue a copy from or to `home`, which stays locked until it has been made."""
    arena = page_locks.LOCKS.arena_of(home)  # None: torch's own allocator does the same for its own
    ticket.issue(stream, lambda: _queue_copy(to, source))
    if arena is not None:
        arena.under_way["h2d" if home is source else "d2h"] = ticket.wait_host


def _queue_copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _send(stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> Wait:
    """Queue a copy on `stream`, which is the current one; the result waits for it."""
    _queue_copy(to, source)
    event = torch.cuda.Event()
    event.record(stream)
    return event.synchronize


def open_device(torch_device: torch.device) -> Device:
    """The device that computes on `torch_device`."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()
