"""Fake page locks that are granted, for a device that asks for them as a GPU does."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fluxtrain.core.device import page_locks
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.page_locks import PageLocks


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
    monkeypatch.setattr(CpuDevice, "pins", True)
    monkeypatch.setattr(page_locks, "LOCKS", made)
    yield made
    gc.collect()
