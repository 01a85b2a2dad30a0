"""Fake page locks that are granted, for a device that asks for them as a GPU does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device import page_locks
from fluxtrain.core.device.arena import BUFFER_BYTES, Staging, host_copy
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.device import Transfer
from fluxtrain.core.device.page_locks import PageLocks
from fluxtrain.core.wrap import wrap as wrapping


class PinningDevice(CpuDevice):
    """Asks for page locks, keeps memory locked until its copies are made, and copies what is not
    locked through a ring, as a GPU does."""

    pins = True
    ring_bytes = BUFFER_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._rings = {way: Staging(self.ring_bytes) for way in ("h2d", "d2h")}

    def upload(self, to: Tensor, source: Tensor, after: Any, *rest: Any, **how: Any) -> Transfer:
        transfer = super().upload(to, source, after, *rest, **how)
        if after is None:  # else it may wait for the thread that lets the memory go
            self._keep_locked(source, "h2d", transfer)
        return transfer

    def download(self, to: Tensor, source: Tensor) -> Transfer:
        transfer = super().download(to, source)
        self._keep_locked(to, "d2h", transfer)
        return transfer

    def _keep_locked(self, host: Tensor, queue: str, transfer: Transfer) -> None:
        def wait() -> None:
            if not threading.current_thread().name.startswith("flux-"):  # it may make the copy
                transfer.wait_host()

        arena = page_locks.LOCKS.arena_of(host)
        if arena is not None:
            arena.under_way[queue] = wait

    def _make(self, way: str, to: Tensor, source: Tensor) -> tuple[float, float]:
        if page_locks.LOCKS.holds(source if way == "h2d" else to):
            return super()._make(way, to, source)
        ring = self._rings[way]
        (ring.upload if way == "h2d" else ring.download)(to, source, _copy_now)
        return 0.0, 0.0


def _copy_now(to: Tensor, source: Tensor) -> Callable[[], None]:
    host_copy(to, source)
    return lambda: None


def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wrapped models compute on such devices."""

    def opened(_: torch.device, *, one_of_several: bool = False) -> PinningDevice:
        return PinningDevice()

    monkeypatch.setattr(wrapping, "open_device", opened)


class Granted(PageLocks):
    """A system that locks all it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    def _register(self, address: int, size_bytes: int) -> bool:
        self.attempts += 1
        return True

    def _unregister(self, address: int) -> None:
        pass


def granting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Granted]:
    """For a fixture: devices lock their memory meanwhile."""
    made = Granted()
    pinning(monkeypatch)
    monkeypatch.setattr(page_locks, "LOCKS", made)
    yield made
    gc.collect()
