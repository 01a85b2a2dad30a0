"""The random state and the autocast mode of a computation, kept so that it can be run again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class HostRandom:
    """The states of Python's and numpy's own generators. Reading and restoring them takes 80 us, so
    this is done only for blocks that draw from them (some skip layers by `random.random()`)."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> HostRandom:
        return HostRandom(random.getstate(), np.random.get_state())

    def has_moved(self) -> bool:
        """Return whether random numbers were drawn since."""
        _, words, place, *_ = self.numpy
        _, now, place_now, *_ = np.random.get_state()
        return (
            random.getstate() != self.python or place_now != place or not np.array_equal(words, now)
        )

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@dataclass(frozen=True)
class RandomState:
    """Generator states before a computation."""

    cpu: Tensor
    cuda: Tensor | None
    host: HostRandom | None

    @staticmethod
    def now(device: torch.device, *, host: bool) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(torch.get_rng_state(), cuda, HostRandom.now() if host else None)

    def lend(self, first: torch.device, device: torch.device) -> AbstractContextManager[None]:
        """Draw the numbers of `first`, whose state this is, on `device` inside the context: so
        blocks on several GPUs draw one sequence, as on one."""
        return nullcontext() if first == device else self._lent(first, device)

    @contextmanager
    def _lent(self, first: torch.device, device: torch.device) -> Iterator[None]:
        assert self.cuda is not None
        torch.cuda.set_rng_state(self.cuda, device)
        try:
            yield
        finally:
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), first)

    def has_moved(self, device: torch.device) -> bool:
        """Return whether random numbers were drawn since, on the host or on `device`."""
        now = RandomState.now(device, host=False)
        moved = not torch.equal(now.cpu, self.cpu)
        if self.cuda is not None and now.cuda is not None:
            moved |= not torch.equal(now.cuda, self.cuda)
        return moved or (self.host is not None and self.host.has_moved())

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
        if self.host is not None:
            self.host.restore()


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state after the context."""
    before = RandomState.now(device, host=True)
    try:
        yield
    finally:
        before.restore(device)


@dataclass(frozen=True)
class Autocast:
    """The autocast mode of the forward pass. Its weight cache stays off inside blocks: it would
    hold a copy of every weight."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device: torch.device) -> Autocast:
        kind = device.type
        return Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )
