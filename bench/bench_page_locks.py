"""How fast fresh host memory is page-locked, and freed, by what its pages are and who makes them.

    python bench/bench_page_locks.py --gib 4 --rounds 3

All ways in turn, of `HostArena`; the last is what trainings do. Without a GPU nothing is locked:
then pages are only made and freed.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch

from fluxtrain.core.device import arena as arenas
from fluxtrain.machine.fresh_memory import fresh, touch
from fluxtrain.units import GIB


def shared(size_bytes: int) -> mmap.mmap:
    """As Python makes anonymous mappings unless it is told otherwise."""
    return mmap.mmap(-1, size_bytes)


def small(size_bytes: int) -> mmap.mmap:
    """A private one, without advice."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@dataclass
class Way:
    """One way to come by locked memory, and the seconds that it took and that freeing took."""

    name: str
    mapping: Callable[[int], mmap.mmap]
    touched: bool
    locked_s: list[float] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)

    def take(self, size_bytes: int, *, pin: bool) -> None:
        """Make an arena and let it go. SystemExit where it should be locked and is not."""
        made = touch if self.touched else lambda memory: False
        with mock.patch.multiple(arenas, fresh=self.mapping, touch=made):
            start_s = time.perf_counter()
            arena = arenas.HostArena(size_bytes, pin=pin)
            if not pin:
                arena.tensor(torch.uint8, size_bytes, 0).zero_()
            self.locked_s.append(time.perf_counter() - start_s)
        if pin and not arena.pinned_bytes:
            sys.exit(f"the system refused to lock {size_bytes / GIB:g} GiB")
        start_s = time.perf_counter()
        del arena
        self.freed_s.append(time.perf_counter() - start_s)


WAYS = (
    Way("shared, made by the driver", shared, touched=False),
    Way("shared, made by all threads", shared, touched=True),
    Way("private, made by all threads", small, touched=True),
    Way("huge, made by the driver", fresh, touched=False),
    Way("huge, made by all threads", fresh, touched=True),
)


def main() -> None:
    """Parse the command line; print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if pin := torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context is not part of the time
    ways = [way for way in WAYS if pin or way.touched]
    for _ in range(options.rounds):
        for way in ways:
            way.take(int(options.gib * GIB), pin=pin)
    print(f"{options.gib:g} GiB, {torch.get_num_threads()} threads, {'locked' if pin else 'made'}")
    for way in ways:
        rate, freed = (options.gib / statistics.median(s) for s in (way.locked_s, way.freed_s))
        each = ", ".join(f"{options.gib / one:.2f}" for one in way.locked_s)
        print(f"{way.name:30} {rate:6.2f} GiB/s ({each}), freed with {freed:7.1f}")


if __name__ == "__main__":
    main()
