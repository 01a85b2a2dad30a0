"""One NVIDIA GPU as a device: copies run on streams of their own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device import page_locks
from fluxtrain.core.device.arena import Staging, Wait
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.current_gpu import CurrentStream
from fluxtrain.core.device.device import Device, Transfer, all_arrived
from fluxtrain.core.device.disk import FilePart
from fluxtrain.core.device.multi_gpu_streams import LANES, Joins, MultiGpuStreams
from fluxtrain.core.device.recorder import CudaClock, Instant, Recorder, Stalls
from fluxtrain.core.device.worker import Worker

_HERE: AbstractContextManager[None] = nullcontext()


class CudaTransfer:
    """A `Transfer` that is queued on a CUDA stream, now or later; events tell when it ran."""

    def __init__(self, stalls: Stalls, current: CurrentStream, late: str = "update") -> None:
        """Begin a transfer; the computation waits for `late` while the copy is not yet on its
        stream."""
        self._stalls, self._current, self._late = stalls, current, late
        self._issued = threading.Event()
        self._arrived = False  # once seen: asking the driver again would release the GIL
        self._start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self._error: BaseException | None = None

    def issue(
        self, stream: torch.cuda.Stream, copy: Callable[[], None],
        behind: Iterable[torch.cuda.Event] = (),
    ) -> None:  # fmt: skip
        """Queue the copy on `stream` behind these events; waits raise what goes wrong here too."""
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
        """Give up a copy that was not issued: waits raise `error`."""
        self._error = error
        self._issued.set()

    @property
    def duration_s(self) -> float | None:
        return self._start.elapsed_time(self.end) / 1e3 if self.done() else None

    def _has_arrived(self) -> bool:
        """Return whether a copy that was issued has arrived."""
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
            self._stalls.add(self._late, time.perf_counter() - started_s)
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


class CudaDevice(Device):
    """One NVIDIA GPU. Copies run on three streams concurrently with the computation's. Only
    `free`, `follows` and the computation's waits order copies of different streams. Host memory
    that is not page-locked is copied by threads, through `Staging`."""

    pins = True

    def __init__(self, torch_device: torch.device, *, one_of_several: bool = False) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        self.torch_device = current if torch_device == torch.device("cuda") else torch_device
        self._current = CurrentStream(self.torch_device)
        self.recorder = Recorder(CudaClock(self._current))
        self.stalls = Stalls(self.recorder)
        self._up = torch.cuda.Stream(self.torch_device)
        self._behind = torch.cuda.Stream(self.torch_device)  # uploads that follow other transfers
        self._down = torch.cuda.Stream(self.torch_device)
        self._beside = torch.cuda.Stream(self.torch_device)  # what other processes add
        self._several = (
            MultiGpuStreams(self.torch_device, self._current) if one_of_several else None
        )
        self.lanes = LANES if one_of_several else 1
        self._staging = (Staging(), Staging())  # now: the system may refuse page locks later
        self._reading: tuple[Staging, torch.cuda.Stream] | None = None  # of checkpoints
        self._up_thread, self._down_thread = Worker("flux-staged-up"), Worker("flux-staged-down")
        self._behind_thread = Worker("flux-staged-behind")

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Transfer] = (), *, urgent: bool = False,
    ) -> Transfer:  # fmt: skip
        transfer = CudaTransfer(self.stalls, self._current)
        waits = not all_arrived(follows)
        if not (page_locks.LOCKS.holds(source) and all(map(_was_issued, follows))):
            work = partial(self._upload_staged, transfer, to, source, after, free, follows)
            if waits:
                self._behind_thread.submit(partial(self._upload_after, transfer, follows, work))
            else:
                self._up_thread.submit(work)
            return transfer
        stream = self._behind if waits else self._up

        def issue(done: Future[None] | None) -> None:
            if done is not None and (error := _failure(done)) is not None:
                transfer.fail(error)
                return
            ends = [earlier.end for earlier in follows if isinstance(earlier, CudaTransfer)]
            _issue(transfer, stream, to, source, host=source, behind=[*_points(free), *ends])

        if after is None or after.done():
            issue(after)
        else:
            after.add_done_callback(issue)
        return transfer

    def upload_files(
        self, to: Tensor, parts: Sequence[FilePart], free: Any, follows: Sequence[Transfer],
        after: Future[None] | None = None,
    ) -> Transfer:  # fmt: skip
        transfer = CudaTransfer(self.stalls, self._current, late="disk")
        disk = self.disk

        def copy() -> None:
            disk.copy(to, parts, partial(_queue_on, self._up))
            for earlier in follows:
                earlier.wait_host()

        def work() -> None:
            try:
                if after is not None:
                    after.result()
            except BaseException as error:
                transfer.fail(error)
                raise
            transfer.issue(self._up, copy, _points(free))

        disk.worker.submit(work)
        return transfer

    def download(self, to: Tensor, source: Tensor) -> Transfer:
        transfer = CudaTransfer(self.stalls, self._current)
        if not page_locks.LOCKS.holds(to):
            work = partial(self._download_staged, transfer, to, source, self.mark())
            self._down_thread.submit(work)
            return transfer
        _issue(transfer, self._down, to, source, host=to, behind=[self.mark()])
        return transfer

    def beside(self, work: Callable[[], None]) -> Transfer:
        transfer = CudaTransfer(self.stalls, self._current)
        transfer.issue(self._beside, work, [self.mark()])
        return transfer

    def _upload_after(
        self, transfer: CudaTransfer, follows: Sequence[Transfer], work: Callable[[], None]
    ) -> None:
        """Wait, on a thread, for the transfers that an upload follows; then pass the upload to the
        thread of uploads, which checks how they ended."""
        for earlier in follows:
            with contextlib.suppress(BaseException):
                earlier.wait_host()
        try:
            self._up_thread.submit(work)
        except BaseException as error:  # the process ends
            transfer.fail(error)
            raise

    def _upload_staged(
        self, transfer: CudaTransfer, to: Tensor, source: Tensor, after: Future[None] | None,
        free: Any, follows: Sequence[Transfer],
    ) -> None:  # fmt: skip
        """Upload, on a thread, from memory that is not page-locked, which is read before this
        returns, or behind transfers that threads make."""
        try:
            if after is not None:
                after.result()
            for earlier in follows:
                earlier.wait_host()
        except BaseException as error:
            transfer.fail(error)
            raise
        send = partial(_queue_on, self._up)
        transfer.issue(self._up, lambda: self._staging[0].upload(to, source, send), _points(free))

    def _download_staged(
        self, transfer: CudaTransfer, to: Tensor, source: Tensor, point: torch.cuda.Event
    ) -> None:
        """Download, on a thread, to memory that is not page-locked; the transfer counts as issued
        when the bytes are there."""
        send = partial(_queue_on, self._down)
        transfer.issue(self._down, lambda: self._staging[1].download(to, source, send), [point])

    def read(self, point: torch.cuda.Event, to: Tensor, source: Tensor) -> None:
        if self._reading is None:
            self._reading = Staging(), torch.cuda.Stream(self.torch_device)
        staging, stream = self._reading
        with torch.cuda.stream(stream):
            stream.wait_event(point)
            staging.download(to, source.contiguous(), partial(_queue_on, stream))

    def for_copies(self, memory: Tensor) -> Tensor:
        for stream in (self._up, self._behind, self._down):
            memory.record_stream(stream)
        return memory

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._current())
        return event

    def computing(self, *, joins: Joins = "now", lane: int = 0) -> AbstractContextManager[None]:
        return _HERE if self._several is None else self._several.computing(joins=joins, lane=lane)

    def used_here(self, tensor: Tensor) -> None:
        if self._several is not None and tensor.device == self.torch_device:
            tensor.record_stream(self._current())

    def wait_for(self, point: Any) -> None:
        if point is None or point.query():
            return
        start = self.recorder.instant()
        self._current().wait_event(point)
        self.recorder.waited("cards", start)

    def wait_outside(self, point: Any) -> None:
        self._current().wait_event(point)

    def landing(self, like: Tensor, way: int = 0) -> Tensor:
        assert self._several is not None
        return self._several.landing(like, way)

    def hand_out(self, made: Tensor) -> None:
        if self._several is not None and made.device == self.torch_device:
            self._several.hand_out(made)

    def land(
        self, to: Tensor, source: Tensor, after: Sequence[Any], sender: Any, way: int = 0
    ) -> Any:
        assert self._several is not None
        return self._several.land(to, source, after, sender._several, way)

    def keep_pace(self) -> None:
        if self._several is not None:
            self._several.keep_pace(self.mark())

    def close(self) -> None:
        super().close()
        for worker in (self._behind_thread, self._up_thread, self._down_thread):
            worker.close()
        for stream in (self._up, self._behind, self._down, self._beside):
            stream.synchronize()


def open_device(torch_device: torch.device, *, one_of_several: bool = False) -> Device:
    """Open the device that computes on `torch_device`, alone or as one of several."""
    if torch_device.type == "cuda":
        return CudaDevice(torch_device, one_of_several=one_of_several)
    return CpuDevice()


def _failure(done: Future[None]) -> BaseException | None:
    """Return what the finished future `done` raises, or None."""
    return CancelledError() if done.cancelled() else done.exception()


def _was_issued(transfer: Transfer) -> bool:
    """Return whether the transfer is on a stream, so that streams can wait for it."""
    return transfer.instants() is not None


def _points(free: Any) -> list[torch.cuda.Event]:
    """Return the events that `upload(free=...)` waits for."""
    return [] if free is None else [free]


def _issue(
    transfer: CudaTransfer, stream: torch.cuda.Stream, to: Tensor, source: Tensor, *, host: Tensor,
    behind: Sequence[torch.cuda.Event],
) -> None:  # fmt: skip
    """Queue a copy from or to `host` memory, and keep that locked until the copy is made."""
    arena = page_locks.LOCKS.arena_of(host)  # None: torch's allocator locked it, and does this
    transfer.issue(stream, lambda: _queue_copy(to, source), behind)
    if arena is not None:
        arena.under_way[stream] = transfer.wait_host


def _queue_copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _queue_on(stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> Wait:
    """Queue a copy on the current stream, `stream`; the returned function waits for it."""
    _queue_copy(to, source)
    event = torch.cuda.Event()
    event.record(stream)
    return event.synchronize
