"""The two devices that blocks are computed on, and the copies to and from them.

On CUDA the copies run on streams of their own, one a direction, and a third for uploads that wait
for other copies (sums of gradients whose way home is not over): those queued behind them, weights,
wait for nothing. On CPU the "device" is a separate buffer and the copies run on two threads, with
a third that waits, so that streaming is exercised for real. A `Ticket` is one copy under way; all
waiting goes through it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fluxtrain.memory import page_locks
from fluxtrain.memory.cuda_ticket import CudaTicket
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
        copies `follows` have arrived. One that still waits for these holds up none but its like:
        later ones may come first. urgent: not behind copies that still wait for their `after`."""

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
    """The host's own memory as a device; copies run on one thread a direction, and those that
    follow others are handed to it by a thread that waits for these."""

    pins = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.recorder = Recorder(HostClock())
        self.stalls = Stalls(self.recorder)
        self._up = Worker("flux-upload")
        self._behind = Worker("flux-upload-behind")
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

        def behind() -> tuple[float, float]:
            for earlier in follows:
                earlier.wait_host()
            return self._up.submit(job).result()

        copy = self._copying(source, 0)
        if urgent and after is None and not follows:  # this thread is the computation's
            made: Future[tuple[float, float]] = Future()
            made.set_result(_timed(copy, to, source))
            return _CpuTicket(made, self.stalls)
        waits = not _all_arrived(follows)
        ticket = _CpuTicket(
            self._behind.submit(behind) if waits else self._up.submit(job), self.stalls
        )
        if after is None:  # else it may wait for the thread that lets the memory go
            # the way home that it waits for is theirs too
            workers = (self._up, self._behind, self._down) if waits else (self._up,)
            self._note(source, "h2d behind" if waits else "h2d", workers, ticket)
        return ticket

    def download(self, to: Tensor, source: Tensor) -> Ticket:
        work = partial(_timed, self._copying(to, 1), to, source)
        ticket = _CpuTicket(self._down.submit(work), self.stalls)
        self._note(to, "d2h", (self._down,), ticket)
        return ticket

    def _note(self, home: Tensor, way: str, made_by: Sequence[Worker], ticket: _CpuTicket) -> None:
        """Memory that is locked, as for a GPU, stays so until the copy has been made."""
        arena = page_locks.LOCKS.arena_of(home) if self.pins else None
        if arena is not None:
            wait: Callable[[], None] = ticket.wait_host
            for worker in made_by:
                wait = partial(worker.unless_here, wait)
            arena.under_way[way] = wait

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
        for worker in (self._behind, self._up, self._down):  # the first hands on to the second
            worker.close()


def _timed(copy: Copy, to: Tensor, source: Tensor) -> tuple[float, float]:
    """Copy; when that began and ended."""
    started_s = time.perf_counter()
    copy(to, source)
    return started_s, time.perf_counter()


def _sent(to: Tensor, source: Tensor) -> Wait:
    """A copy that is made at once."""
    host_copy(to, source)
    return lambda: None


class CudaDevice:
    """One NVIDIA GPU; copies run on three streams beside the computation's. Between copies of two
    streams nothing is ordered but what `free`, `follows` and the computation's waits order."""

    pins = True

    def __init__(self, torch_device: torch.device) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        self.torch_device = current if torch_device == torch.device("cuda") else torch_device
        self._current = CurrentStream(self.torch_device)
        self.recorder = Recorder(CudaClock(self.torch_device))
        self.stalls = Stalls(self.recorder)
        self._up = torch.cuda.Stream(self.torch_device)
        self._behind = torch.cuda.Stream(self.torch_device)  # uploads that wait for other copies
        self._down = torch.cuda.Stream(self.torch_device)
        self._staging = (Staging(), Staging())  # now: later the system may refuse its page locks
        self._up_thread, self._down_thread = Worker("flux-staged-up"), Worker("flux-staged-down")
        self._behind_thread = Worker("flux-staged-behind")

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Ticket] = (), *, urgent: bool = False,
    ) -> Ticket:  # fmt: skip
        ticket = CudaTicket(self.stalls, self._current)
        waits = not _all_arrived(follows)
        if not (page_locks.LOCKS.holds(source) and all(map(_was_issued, follows))):
            work = partial(self._staged_up, ticket, to, source, after, free, follows)
            if waits:
                self._behind_thread.submit(partial(self._hand_on, ticket, follows, work))
            else:
                self._up_thread.submit(work)
            return ticket
        stream = self._behind if waits else self._up

        def issue(done: Future[None] | None) -> None:
            if done is not None and (error := _failure(done)) is not None:
                ticket.fail(error)
                return
            ends = [earlier.end for earlier in follows if isinstance(earlier, CudaTicket)]
            _issue(ticket, stream, to, source, home=source, behind=[*_points(free), *ends])

        if after is None or after.done():
            issue(after)
        else:
            after.add_done_callback(issue)
        return ticket

    def download(self, to: Tensor, source: Tensor) -> Ticket:
        ticket = CudaTicket(self.stalls, self._current)
        if not page_locks.LOCKS.holds(to):
            work = partial(self._staged_down, ticket, to, source, self.mark())
            self._down_thread.submit(work)
            return ticket
        _issue(ticket, self._down, to, source, home=to, behind=[self.mark()])
        return ticket

    def _hand_on(
        self, ticket: CudaTicket, follows: Sequence[Ticket], work: Callable[[], None]
    ) -> None:
        """On a thread: what follows copies under way, once they are made, to the thread of those
        that wait for none, which asks how they ended."""
        for earlier in follows:
            with contextlib.suppress(BaseException):
                earlier.wait_host()
        try:
            self._up_thread.submit(work)
        except BaseException as error:  # the process ends
            ticket.fail(error)
            raise

    def _staged_up(
        self, ticket: CudaTicket, to: Tensor, source: Tensor, after: Future[None] | None,
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
        send = partial(_send, self._up)
        ticket.issue(self._up, lambda: self._staging[0].up(to, source, send), _points(free))

    def _staged_down(
        self, ticket: CudaTicket, to: Tensor, source: Tensor, point: torch.cuda.Event
    ) -> None:
        """On a thread: to memory that is not page-locked; issued once the bytes are there."""
        send = partial(_send, self._down)
        ticket.issue(self._down, lambda: self._staging[1].down(to, source, send), [point])

    def for_copies(self, memory: Tensor) -> Tensor:
        for stream in (self._up, self._behind, self._down):
            memory.record_stream(stream)
        return memory

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._current())
        return event

    def tidy(self) -> None:
        return None  # torch's allocator of device memory reuses what is free

    def close(self) -> None:
        for worker in (self._behind_thread, self._up_thread, self._down_thread):
            worker.close()
        for stream in (self._up, self._behind, self._down):
            stream.synchronize()


def _all_arrived(copies: Sequence[Ticket]) -> bool:
    """Is there none that a copy behind them would wait for?"""
    return all(copy.done() for copy in copies)


def _failure(done: Future[None]) -> BaseException | None:
    """What a future that is done raises, if it does."""
    return CancelledError() if done.cancelled() else done.exception()


def _was_issued(ticket: Ticket) -> bool:
    """Is it on a stream, so that streams can wait for it?"""
    return ticket.instants() is not None


def _points(free: Any) -> list[torch.cuda.Event]:
    """What `upload(free=...)` waits for."""
    return [] if free is None else [free]


def _issue(
    ticket: CudaTicket, stream: torch.cuda.Stream, to: Tensor, source: Tensor, *, home: Tensor,
    behind: Sequence[torch.cuda.Event],
) -> None:  # fmt: skip
    """Queue a copy from or to `home`, which stays locked until it has been made."""
    arena = page_locks.LOCKS.arena_of(home)  # None: torch's own allocator does the same for its own
    ticket.issue(stream, lambda: _queue_copy(to, source), behind)
    if arena is not None:
        arena.under_way[stream] = ticket.wait_host


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
