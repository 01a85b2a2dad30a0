"""Host memory as a device: copies run on threads, so that streaming is exercised without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device.arena import Wait, host_copy
from fluxtrain.core.device.device import Device, Transfer, all_arrived
from fluxtrain.core.device.disk import FilePart
from fluxtrain.core.device.heap import Heap
from fluxtrain.core.device.recorder import HostClock, Instant, Recorder, Stalls
from fluxtrain.core.device.worker import Worker


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


class CpuDevice(Device):
    """The host's own memory as a device. Copies run on one thread a direction; a third thread waits
    for the copies that an upload follows and then hands it to the thread of uploads."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.recorder = Recorder(HostClock())
        self.stalls = Stalls(self.recorder)
        self._up = Worker("flux-upload")
        self._behind = Worker("flux-upload-behind")
        self._down = Worker("flux-download")
        self._beside = Worker("flux-exchange")
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
            return self._make("h2d", to, source)

        def behind() -> tuple[float, float]:
            for earlier in follows:
                earlier.wait_host()
            return self._up.submit(job).result()

        if urgent and after is None and not follows:  # this thread is the computation's
            made: Future[tuple[float, float]] = Future()
            made.set_result(self._make("h2d", to, source))
            return CpuTransfer(made, self.stalls)
        future = self._up.submit(job) if all_arrived(follows) else self._behind.submit(behind)
        return CpuTransfer(future, self.stalls)

    def upload_files(
        self, to: Tensor, parts: Sequence[FilePart], free: Any, follows: Sequence[Transfer],
        after: Future[None] | None = None,
    ) -> Transfer:  # fmt: skip
        disk = self.disk

        def job() -> tuple[float, float]:
            if after is not None:
                after.result()
            started_s = time.perf_counter()
            disk.copy(to, parts, _copy_now)
            for earlier in follows:
                earlier.wait_host()
            return started_s, time.perf_counter()

        return CpuTransfer(disk.worker.submit(job), self.stalls)

    def download(self, to: Tensor, source: Tensor) -> Transfer:
        return CpuTransfer(self._down.submit(partial(self._make, "d2h", to, source)), self.stalls)

    def beside(self, work: Callable[[], None]) -> Transfer:
        def job() -> tuple[float, float]:
            started_s = time.perf_counter()
            work()
            return started_s, time.perf_counter()

        return CpuTransfer(self._beside.submit(job), self.stalls)

    def _make(self, way: str, to: Tensor, source: Tensor) -> tuple[float, float]:
        """Copy `h2d` or `d2h`, on this thread; return when the copy began and ended."""
        started_s = time.perf_counter()
        host_copy(to, source)
        return started_s, time.perf_counter()

    def tidy(self) -> None:
        self._heap.tidy()

    def close(self) -> None:
        super().close()  # reads of files may wait for the others
        for worker in (self._behind, self._up, self._down):  # the first hands on to the second
            worker.close()
        self._beside.close()


def _copy_now(to: Tensor, source: Tensor) -> Wait:
    """Copy at once: nothing is left to wait for."""
    host_copy(to, source)
    return lambda: None
