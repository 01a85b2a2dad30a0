"""A GPU's streams, each on a thread, so that `CudaDevice` copies for real where there is no GPU.

The computation is made by the thread that asks for it: whatever it waits for it waits for at once.
What a copy writes to is garbage until it has been made.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device import cuda_device as devices
from fluxtrain.core.device import page_locks
from fluxtrain.core.device.page_locks import PageLocks
from fluxtrain.core.device.recorder import HostClock, Recorder, Stalls
from fluxtrain.core.device.worker import Worker
from fluxtrain.core.wrap import wrap as wrapping

_PAUSES_S = (0.0, 0.0, 0.0, 0.003)  # of a copy
_HOME = 10  # times: so slow that the next pass finds gradients on their way


class _Stream:
    def __init__(self, *_: object, **numbers: int) -> None:
        self._thread = None if numbers else Worker("gpu-stream")  # numbers: the computation's

    def queue(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            work()
        else:
            self._thread.submit(work)

    def wait_event(self, event: _Event) -> None:
        assert event.recorded, "what was not recorded holds nothing up"
        self.queue(event.passed.wait)

    def synchronize(self) -> None:
        event = _Event()
        event.record(self)
        event.synchronize()


class _Event:
    def __init__(self, *, enable_timing: bool = False) -> None:
        self.recorded, self.passed = False, threading.Event()

    def record(self, stream: _Stream) -> None:
        self.recorded = True
        stream.queue(self.passed.set)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.recorded
        self.passed.wait()

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _SomeLocks(PageLocks):
    """A system that refuses now and then, and is asked again."""

    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        self._drawn = drawn

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _refused(self, size_bytes: int) -> bool:
        return False

    def _register(self, address: int, size_bytes: int) -> bool:
        return self._drawn.random() < 0.7

    def _unregister(self, address: int) -> None:
        pass

    def _locked_by_torch(self, memory: Tensor) -> bool:
        return False


def streaming(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[devices.CudaDevice]:
    """From now on models are wrapped for such a GPU; those that were opened."""
    drawn, here, opened = random.Random(seed), threading.local(), list[devices.CudaDevice]()

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        here.stream, before = stream, getattr(here, "stream", None)
        yield
        here.stream = before

    def queue_copy(to: Tensor, source: Tensor) -> None:
        assert to.nbytes == source.nbytes
        goes_home = here.stream is opened[-1]._down
        pause_s = drawn.choice(_PAUSES_S) * (_HOME if goes_home else 1)

        def copy() -> None:
            ctypes.memset(to.data_ptr(), 0xFF, to.nbytes)
            time.sleep(pause_s)
            ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)

        here.stream.queue(copy)

    class OnThreads(devices.CudaDevice):
        def __init__(self, _: torch.device, *, one_of_several: bool = False) -> None:
            super().__init__(torch.device("cuda", 0))
            self.torch_device = torch.device("cpu")
            self.recorder = Recorder(HostClock())
            self.stalls = Stalls(self.recorder)
            opened.append(self)

        def for_copies(self, memory: Tensor) -> Tensor:
            return memory  # whoever copies holds it

    fakes: dict[str, Any] = {"Stream": _Stream, "Event": _Event, "stream": on}
    for name, fake in {**fakes, "current_device": lambda: 0}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda _: (0, 0, 1), raising=False)
    monkeypatch.setattr(devices, "_queue_copy", queue_copy)
    monkeypatch.setattr(page_locks, "LOCKS", _SomeLocks(drawn))
    monkeypatch.setattr(wrapping, "open_device", OnThreads)
    return opened
