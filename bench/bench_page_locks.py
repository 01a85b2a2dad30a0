"""How fast fresh host memory is page-locked: by the driver alone, or touched by all threads before.

    python bench/bench_page_locks.py --gib 4 --rounds 3

Both in turn, of `HostArena` as trainings make it. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from unittest import mock

import torch

from fluxtrain.hardware import fresh_memory
from fluxtrain.memory import arena as arenas
from fluxtrain.units import GIB


def locked_s(size_bytes: int, *, touched: bool) -> float:
    """Seconds until an arena stands; it is gone afterwards. SystemExit where it is not locked."""
    touch = fresh_memory.touch if touched else lambda memory: False
    with mock.patch.object(arenas, "touch", touch):
        starts_s = time.perf_counter()
        arena = arenas.HostArena(size_bytes, pin=True)
        taken_s = time.perf_counter() - starts_s
    if not arena.pinned_bytes:
        sys.exit(f"the system refused to lock {size_bytes / GIB:g} GiB")
    return taken_s


def main() -> None:
    """Parse the command line; print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch has no GPU to use: nothing can be page-locked here")
    torch.zeros(1, device="cuda")  # the context is not part of the time
    size_bytes = int(options.gib * GIB)
    taken: dict[bool, list[float]] = {False: [], True: []}  # by whether it was touched
    for _ in range(options.rounds):
        for touched, seconds in taken.items():
            seconds.append(locked_s(size_bytes, touched=touched))
    for touched, seconds in taken.items():
        words = f"touched by {torch.get_num_threads()} threads" if touched else "by the driver"
        rates = ", ".join(f"{options.gib / one:.2f}" for one in seconds)
        print(f"{words}: {options.gib / statistics.median(seconds):.2f} GiB/s ({rates})")


if __name__ == "__main__":
    main()
