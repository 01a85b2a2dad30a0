"""The native optimizer against the memory's own speed: `make bench-cpu`.

Each kernel is timed beside `stream_split`, which reads and writes what AdamW on split masters does
and computes nothing, so its rate is the most that memory allows. Best of several rounds, because
other programs can only make a round slower.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.split_adamw import accumulate_, encode, sum_squares, update_, update_f32_

SPLIT_BYTES = 26  # per element: hi, lo, m, v read and written, a bf16 gradient read
F32_BYTES = 28  # p, m, v read and written, an fp32 gradient read
HYPER = Hyper(lr=1e-4)


class Arena:
    """One block's host arena of `n` elements with a gradient in both widths."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n = n
        self.p = torch.randn(n, generator=generator) * 0.02
        self.hi, self.lo = encode(self.p)
        self.m, self.v = torch.zeros(n), torch.zeros(n)
        self.grad_f32 = torch.randn(n, generator=generator) * 1e-3
        self.grad = self.grad_f32.bfloat16()
        self.step = 0

    def stream(self, threads: int) -> None:
        pointers = (x.data_ptr() for x in (self.hi, self.lo, self.m, self.v, self.grad))
        _native.kernel("stream_split")(*pointers, self.n, threads)

    def split(self, grad: Tensor, threads: int) -> None:
        self.step += 1
        state = (self.hi, self.lo, self.m, self.v)
        update_(*state, grad, hyper=HYPER, step=self.step, threads=threads)

    def f32(self, threads: int) -> None:
        self.step += 1
        state = (self.p, self.m, self.v)
        update_f32_(*state, self.grad_f32, hyper=HYPER, step=self.step, threads=threads)


def best_seconds(run: Callable[[], object], rounds: int) -> float:
    """The fastest of `rounds` calls after one that is not counted."""
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def kernels(arena: Arena, threads: int) -> list[tuple[str, int, Callable[[], object]]]:
    """Name, bytes an element and call of everything that is held against the stream."""
    return [
        ("adamw split, bf16 grad", SPLIT_BYTES, lambda: arena.split(arena.grad, threads)),
        ("adamw split, f32 grad", SPLIT_BYTES + 2, lambda: arena.split(arena.grad_f32, threads)),
        ("adamw f32", F32_BYTES, lambda: arena.f32(threads)),
        ("accumulate bf16", 10, lambda: accumulate_(arena.p, arena.grad, threads=threads)),
        ("sum of squares bf16", 2, lambda: sum_squares(arena.grad, threads=threads)),
    ]


def measure(arena: Arena, isas: list[str], threads: int, rounds: int) -> None:
    """Print the stream's row, then one per instruction set and kernel; the last column is the
    rate in bytes against the stream's."""
    best = _native.set_isa(_native.ISA_NAMES[-1])
    stream_s = best_seconds(lambda: arena.stream(threads), rounds)
    stream_bytes_per_s = arena.n * SPLIT_BYTES / stream_s
    rows = [(best, "stream (no arithmetic)", SPLIT_BYTES, stream_s)]
    for isa in isas:
        used = _native.set_isa(isa)
        for name, element_bytes, run in kernels(arena, threads):
            rows.append((used, name, element_bytes, best_seconds(run, rounds)))
    for used, name, element_bytes, seconds in rows:
        bytes_per_s = arena.n * element_bytes / seconds
        print(
            f"{used:8} {threads:7d}  {name:24} {arena.n / seconds / 1e9:8.3f} "
            f"{bytes_per_s / 1e9:8.1f} {bytes_per_s / stream_bytes_per_s:8.2f}"
        )


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", type=float, default=32.0, help="elements, in millions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", nargs="*", default=None, choices=_native.ISA_NAMES)
    parser.add_argument("--threads", type=int, nargs="*", default=None)
    arguments = parser.parse_args()
    everything = len(os.sched_getaffinity(0))
    arena = Arena(int(arguments.million * 1e6))
    print(f"{arena.n / 1e6:.0f} M elements, {everything} processors")
    print("isa      threads  kernel                   Gparam/s     GB/s  /stream")
    isas = arguments.isa or [_native.isa()]
    for threads in arguments.threads or sorted({1, everything}):
        measure(arena, isas, threads, arguments.rounds)


if __name__ == "__main__":
    main()
