"""Host memory as a device: copies run on threads, so that streaming is exercised without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fluxtrain.core.device import page_locks
from fluxtrain.core.device.heap import Heap
from fluxtrain.core.device.recorder import HostClock, Instant, Recorder, Stalls
from fluxtrain.core.device.staging import Staging, Wait, host_copy
from fluxtrain.core.device.transfer import Transfer, all_arrived
from fluxtrain.core.device.worker import Worker

Copy = Callable[[Tensor, Tensor], None]  # (to, from)


class CpuTransfer:
    """A `Transfer` that a thread makes."""

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
    """The host's own memory as a device. Copies run on one thread a direction; a third thread waits
    for the copies that an upload follows and then hands it to the thread of uploads."""

    pins = False
    lanes = 1

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
        follows: Sequence[Transfer] = (), *, urgent: bool = False,
    ) -> Transfer:  # fmt: skip
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

        copy = self._copy_of(source, "upload")
        if urgent and after is None and not follows:  # this thread is the computation's
            made: Future[tuple[float, float]] = Future()
            made.set_result(_timed(copy, to, source))
            return CpuTransfer(made, self.stalls)
        waits = not all_arrived(follows)
        transfer = CpuTransfer(
            self._behind.submit(behind) if waits else self._up.submit(job), self.stalls
        )
        if after is None:  # else it may wait for the thread that lets the memory go
            # an upload that follows downloads is made by their thread too
            workers = (self._up, self._behind, self._down) if waits else (self._up,)
            self._keep_locked(source, "h2d behind" if waits else "h2d", workers, transfer)
        return transfer

    def download(self, to: Tensor, source: Tensor) -> Transfer:
        work = partial(_timed, self._copy_of(to, "download"), to, source)
        transfer = CpuTransfer(self._down.submit(work), self.stalls)
        self._keep_locked(to, "d2h", (self._down,), transfer)
        return transfer

    def _keep_locked(
        self, host: Tensor, queue: str, made_by: Sequence[Worker], transfer: CpuTransfer
    ) -> None:
        """Keep page-locked `host` memory locked until the copy is made, as a GPU needs it."""
        arena = page_locks.LOCKS.arena_of(host) if self.pins else None
        if arena is not None:
            wait: Callable[[], None] = transfer.wait_host
            for worker in made_by:
                wait = partial(worker.unless_here, wait)
            arena.under_way[queue] = wait

    def _copy_of(self, host: Tensor, direction: Literal["upload", "download"]) -> Copy:
        """Choose how `host` memory is copied: directly, or through staging if it is not locked."""
        if self._staging is None or page_locks.LOCKS.holds(host):
            return host_copy
        if direction == "upload":
            return partial(self._staging[0].upload, send=_copy_now)
        return partial(self._staging[1].download, send=_copy_now)

    def for_copies(self, memory: Tensor) -> Tensor:
        return memory  # the threads that copy hold it

    def read(self, point: Any, to: Tensor, source: Tensor) -> None:
        to.copy_(source)

    def mark(self) -> None:
        return None

    def computing(self, *, joins: Any = "now", lane: int = 0) -> AbstractContextManager[None]:
        return nullcontext()  # every computation ends before the next one begins

    def used_here(self, tensor: Tensor) -> None:
        return None

    def wait_for(self, point: Any) -> None:
        return None

    def wait_outside(self, point: Any) -> None:
        return None

    def landing(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def hand_out(self, made: Tensor) -> None:
        return None

    def land(self, to: Tensor, source: Tensor, after: Sequence[Any], sender: Any) -> None:
        to.copy_(source)

    def keep_pace(self) -> None:
        return None

    def tidy(self) -> None:
        self._heap.tidy()

    def close(self) -> None:
        for worker in (self._behind, self._up, self._down):  # the first hands on to the second
            worker.close()


def _timed(copy: Copy, to: Tensor, source: Tensor) -> tuple[float, float]:
    """Copy, and return when the copy began and ended."""
    started_s = time.perf_counter()
    copy(to, source)
    return started_s, time.perf_counter()


def _copy_now(to: Tensor, source: Tensor) -> Wait:
    """Copy at once: nothing is left to wait for."""
    host_copy(to, source)
    return lambda: None
