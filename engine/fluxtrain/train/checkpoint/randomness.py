"""Seeds, saves and restores every random generator of the process, as plain JSON values, and fixes
what else decides the bits of a computation: the number of threads."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def fix_threads() -> int:
    """Fix the number of threads that share a computation for the whole process, and return it.

    Once `torch.set_num_threads` was called, with whatever number, MKL cuts matrix products between
    threads in another way. A run that measures the machine calls it, one that finds the rates in
    the cache does not: without this call at its start, the two would have other bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    return threads


def random_state() -> dict[str, Any]:
    """Return the state of all generators; `restore_random_state` restores it exactly."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`; ignore devices that no longer exist."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)


@contextmanager
def randomness_of(seed: int) -> Iterator[None]:
    """Seed all generators inside the context; afterwards restore their states from before it."""
    before = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        restore_random_state(before)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def tell_of_threads(before: int, warn: Callable[[str], None]) -> None:
    """Warn where sums are shared by another number of threads than `before`, and so rounded
    otherwise."""
    now = torch.get_num_threads()
    if before != now:
        warn(
            f"the run computed with {before} threads before and has {now} now: its losses will "
            f"differ in their last digits from those of a run that never stopped; set "
            f"OMP_NUM_THREADS={before} for the same bits"
        )
