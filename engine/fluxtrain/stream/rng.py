"""The random state and the autocast mode of a computation, kept so that it can be run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Generator states before a computation."""

    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def now(device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Whatever runs inside leaves the random state as it was."""
    before = RandomState.now(device)
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
