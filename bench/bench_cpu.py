"""The native optimizer against the memory's own speed, and the engine's own cost.

    make bench-cpu

Each kernel is timed beside a stream that reads and writes what it does and computes nothing, so
that its rate is the most that memory allows, and beside processes that update what their core's
cache holds (in_cache.py): the most that arithmetic allows, at the clock that the cores have behind
the update. All take turns, on the same cores: those that did most in their caches before, of a
machine that others share. Rates are medians of rounds, and ratios medians of each round's own: a
machine that is shared changes between rounds.

The engine's cost is a wrapped model of tiny blocks against the plain model with the same
recomputation: microseconds a block, forward and backward, that a block of any size pays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import in_cache
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fluxtrain
from fluxtrain import _native
from fluxtrain.memory.arena import HostArena
from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.narrow_adamw import update8_, update16_
from fluxtrain.optim.reference import States8, rounding
from fluxtrain.optim.split_adamw import (
    accumulate_,
    encode,
    sum_squares,
    update_,
    update_f32_,
    update_moments_,
    update_weights_,
)
from fluxtrain.plan.states import STATE_BLOCK

HYPER = Hyper(lr=1e-4)
BLOCKS, WIDTH, ROWS = 24, 64, 8
FP32 = "adamw, fp32 states"
LEAST_S = 5.0  # of rounds, with each number of threads
IN_CACHE_S = 0.05  # of each kind and round


def written(values: Tensor) -> Tensor:
    """The same in memory as a training has it: an arena, of huge pages where the system has any."""
    arena = HostArena(values.nbytes, pin=False)
    return arena.tensor(values.dtype, values.numel(), 0).copy_(values)


class Arena:
    """One block's host arena of `n` elements in every format, with a gradient in both widths."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n = n
        self.p = written(torch.randn(n, generator=generator) * 0.02)
        self.hi, self.lo = (written(part) for part in encode(self.p))
        self.m, self.v = (written(torch.zeros(n)) for _ in range(2))
        self.grad_f32 = written(torch.randn(n, generator=generator) * 1e-3)
        self.grad = written(self.grad_f32.bfloat16())
        self.m16, self.v16 = (written(torch.zeros(n, dtype=torch.bfloat16)) for _ in range(2))
        codes = [written(torch.zeros(n, dtype=torch.uint8)) for _ in range(2)]
        scales = [torch.zeros(-(-n // STATE_BLOCK)) for _ in range(2)]
        self.states8 = States8(*codes, *scales)
        self.step = 0

    def stream(self, name: str, m: Tensor, v: Tensor, threads: int) -> None:
        pointers = (x.data_ptr() for x in (self.hi, self.lo, m, v, self.grad))
        _native.kernel(name)(*pointers, self.n, threads)

    def split(self, grad: Tensor, threads: int) -> None:
        self.step += 1
        state = (self.hi, self.lo, self.m, self.v)
        update_(*state, grad, hyper=HYPER, step=self.step, threads=threads)

    def stream_moments(self, threads: int) -> None:
        pointers = (x.data_ptr() for x in (self.m, self.v, self.grad))
        _native.kernel("stream_moments")(*pointers, self.n, threads)

    def weights(self, threads: int) -> None:
        self.step += 1
        state = (self.hi, self.lo, self.m, self.v)
        update_weights_(*state, self.grad, hyper=HYPER, step=self.step, threads=threads)

    def moments(self, threads: int) -> None:
        self.step += 1
        moments = (self.m, self.v)
        update_moments_(*moments, self.grad, hyper=HYPER, step=self.step, threads=threads)

    def split16(self, threads: int) -> None:
        self.step += 1
        update16_(
            self.hi, self.lo, self.m16, self.v16, self.grad, rounding(0, self.step, 0),
            hyper=HYPER, step=self.step, threads=threads,
        )  # fmt: skip

    def split8(self, threads: int) -> None:
        self.step += 1
        update8_(
            self.hi, self.lo, self.states8, self.grad,
            hyper=HYPER, step=self.step, threads=threads,
        )  # fmt: skip

    def f32(self, threads: int) -> None:
        self.step += 1
        state = (self.p, self.m, self.v)
        update_f32_(*state, self.grad_f32, hyper=HYPER, step=self.step, threads=threads)


@dataclass(frozen=True)
class Row:
    """One kernel: what it moves for each element, the stream that moves as much, and its kind among
    those that are measured in caches."""

    name: str
    element_bytes: float
    run: Callable[[int], object]
    stream: str | None = None
    in_cache: str | None = None


def rows_of(a: Arena) -> list[Row]:
    """Everything that is measured."""
    codes = (a.states8.m, a.states8.v)
    return [  # each kernel behind its stream, and 8-bit states behind fp32 ones
        Row("stream, fp32 states", 26, lambda t: a.stream("stream_split", a.m, a.v, t)),
        Row(FP32, 26, lambda t: a.split(a.grad, t), "stream, fp32 states", "fp32"),
        Row("adamw, 8-bit states", 14.06, a.split8, "stream, 8-bit states", "8bit"),
        Row("stream, 8-bit states", 14, lambda t: a.stream("stream8", *codes, t)),
        Row("stream, weights", 18, lambda t: a.stream("stream_weights", a.m, a.v, t)),
        Row("adamw, weights alone", 18, a.weights, "stream, weights", "weights"),
        Row("stream, moments", 18, a.stream_moments),
        Row("adamw, moments alone", 18, a.moments, "stream, moments", "moments"),
        Row("stream, bf16 states", 18, lambda t: a.stream("stream16", a.m16, a.v16, t)),
        Row("adamw, bf16 states", 18, a.split16, "stream, bf16 states", "bf16"),
        Row("adamw, f32 grad", 28, lambda t: a.split(a.grad_f32, t)),
        Row("adamw, f32 weights", 28, a.f32),
        Row("accumulate bf16", 10, lambda t: accumulate_(a.p, a.grad, threads=t)),
        Row("sum of squares bf16", 2, lambda t: sum_squares(a.grad, threads=t)),
    ]


def turns(
    runs: list[Callable[[], object]], rounds: int, least_s: float = 0, most_s: float = math.inf
) -> list[list[float]]:
    """Seconds of each in every round, called in turn: `rounds` at least, and more for `least_s`;
    the first round is not counted. None begins after `most_s`, but for the first that counts."""
    seconds: list[list[float]] = [[] for _ in runs]
    starts_s, count = time.perf_counter(), 0
    while count < 2 or (
        (taken_s := time.perf_counter() - starts_s) < most_s
        and (count <= rounds or taken_s < least_s)
    ):
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            if count:
                taken.append(time.perf_counter() - start)
        count += 1
    return seconds


def faster(before: list[float], after: list[float]) -> float:
    """How many times: of rounds, since what other programs do changes between them."""
    return statistics.median(old / new for old, new in zip(before, after, strict=True))


class Arithmetic:
    """What it allows: rounds of so many processes in their own caches, by `in_cache.py`, until one
    fails: where the machine is too busy to start them together, say."""

    def __init__(self, threads: int, measure: Callable[[], in_cache.Rates]) -> None:
        self.rounds: list[in_cache.Rates] = []
        self.failed = ""  # why
        self._threads, self._measure = threads, measure

    def __call__(self) -> None:
        if self.failed:
            return
        _native.end_threads()  # for some milliseconds they look out for their next work
        try:
            self.rounds.append(self._measure())
        except RuntimeError as error:
            self.failed = str(error)
            print(f"{self._threads:7d} threads in their caches: {error}")

    def per_s(self, kind: str, clocks: list[float]) -> list[float]:
        """The rates of a kind in the rounds that count, all but the first one, at these clocks."""
        pairs = zip(self.rounds[1:], clocks, strict=False)
        return [rates[kind].at(clock) for rates, clock in pairs]

    def clock_of(self, kind: str | None, clocks: list[float]) -> float | None:
        """The clock beside that in the caches; None where that is not known."""
        if kind is None or len(self.rounds) < 2:
            return None
        pairs = zip(self.rounds[1:], clocks, strict=False)
        return statistics.median(clock / rates[kind].clock for rates, clock in pairs)


@dataclass(frozen=True)
class Timed:
    """One row, and the clock behind each of its runs."""

    row: Row
    threads: int
    clocks: list[float]

    def run(self) -> None:
        self.row.run(self.threads)

    def look(self) -> None:
        if self.row.in_cache:
            self.clocks.append(in_cache.clock())


def measure(
    arena: Arena, threads: int, rounds: int, most_s: float = math.inf
) -> list[dict[str, Any]]:
    """Elements a second of each kernel, against its stream's, against what arithmetic allows and
    against AdamW with fp32 states. A stream runs twice and its second run counts: as its kernel, it
    finds in the caches what a pass over the same arrays left there, which has to be written back
    first."""
    rows = rows_of(arena)
    passes = [row for row in rows for _ in range(2 if row.name.startswith("stream") else 1)]
    timed = [Timed(row, threads, []) for row in passes]
    calls = [call for one in timed for call in (one.run, one.look)]
    with in_cache.waiting(threads, IN_CACHE_S, _native.isa()) as in_caches:
        arithmetic = Arithmetic(threads, in_caches)
        taken = turns([*calls, arithmetic], rounds, LEAST_S, most_s)[:-1:2]
    seconds = {row.name: of_row for row, of_row in zip(passes, taken, strict=True)}  # the last one
    clocks = {one.row.name: one.clocks[1:] for one in timed}  # of the rounds that count
    return [numbers(arena.n, threads, row, seconds, clocks[row.name], arithmetic) for row in rows]


def numbers(
    n: int,
    threads: int,
    row: Row,
    seconds: dict[str, list[float]],
    clocks: list[float],
    arithmetic: Arithmetic,
) -> dict[str, Any]:
    """What is known of one kernel on `n` elements."""
    median_s = statistics.median(seconds[row.name])
    in_caches = arithmetic.per_s(row.in_cache, clocks) if row.in_cache else []
    shares = [n / s / per_s for s, per_s in zip(seconds[row.name], in_caches, strict=False)]
    return {
        "isa": _native.isa(),
        "threads": threads,
        "name": row.name,
        "per_s": n / median_s,
        "bytes_per_s": n * row.element_bytes / median_s,
        "of_stream": faster(seconds[row.stream], seconds[row.name]) if row.stream else None,
        "in_cache_per_s": statistics.median(in_caches) if in_caches else None,
        "of_cache": statistics.median(shares) if shares else None,
        "clock_beside_cache": arithmetic.clock_of(row.in_cache, clocks),
        "of_fp32": faster(seconds[FP32], seconds[row.name]),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line a kernel."""
    for row in rows:
        stream, cache = (f"{row[n]:8.2f}" if row[n] else " " * 8 for n in ("of_stream", "of_cache"))
        print(
            f"{row['isa']:8} {row['threads']:7d}  {row['name']:24} {row['per_s'] / 1e9:8.3f} "
            f"{row['bytes_per_s'] / 1e9:8.1f} {stream} {cache} "
            + (f"{row['of_fp32']:9.2f}" if row["name"].startswith("adamw") else ""),
            flush=True,
        )


class Result:
    """The kernels' numbers in a file that is whole at any time, `done` when nothing is to come."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        self._about = about

    def write(self, *, done: bool = False) -> None:
        if self._path is None:
            return
        found = {**self._about, "rows": self.rows}
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps({**found, "done": done}, indent=1))
        beside.replace(self._path)


class Plain(nn.Module):
    """Blocks that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.square().mean()


def engine_overhead_us(offload: str, rounds: int) -> tuple[float, float]:
    """Microseconds a block, forward and backward: of the plain model that recomputes, and what the
    engine adds."""
    torch.set_num_threads(1)
    plain, wrapped = Plain(), Plain()
    plain.recompute = True
    fluxtrain.wrap(wrapped, device="cpu", offload=offload, chunk_rows=ROWS)
    x = torch.randn(ROWS, WIDTH)

    def pass_of(model: nn.Module) -> None:
        model(x.clone().requires_grad_()).backward()
        model.zero_grad()

    both = list(
        map(statistics.median, turns([lambda: pass_of(plain), lambda: pass_of(wrapped)], rounds))
    )
    fluxtrain.unwrap(wrapped)
    return both[0] / BLOCKS * 1e6, (both[1] - both[0]) / BLOCKS * 1e6


def measure_all(arguments: argparse.Namespace) -> None:
    """The kernels with every number of threads; what is known is written after each."""
    ends_s = time.perf_counter() + arguments.most_s
    everything = len(os.sched_getaffinity(0))
    counts = sorted(set(arguments.threads or (1, max(1, everything // 2), everything)))
    sets = arguments.isa or [_native.ISA_NAMES[-1]]
    arena = Arena(int(arguments.million * 1e6))
    print(f"{arena.n / 1e6:.0f} M elements, {everything} processors")
    print(
        "isa      threads  kernel                   Gparam/s     GB/s  /stream  /cache /fp32 states"
    )
    cases = [(isa, threads) for isa in sets for threads in counts]
    result: Result | None = None
    for at, (isa, threads) in enumerate(cases):
        used = _native.set_isa(isa)
        if result is None:
            about = {"million": arena.n / 1e6, "processors": everything, "isa": used}
            result = Result(arguments.json, about)
        most_s = (ends_s - time.perf_counter()) / (len(cases) - at)
        cores = in_cache.quickest_cores()[:threads]
        with in_cache.on_cores(cores):
            rows = measure(arena, threads, arguments.rounds, most_s)
        print_rows(rows)
        result.rows += rows
        result.write()
    assert result is not None
    result.write(done=True)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", type=float, default=32.0, help="elements, in millions")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", nargs="*", default=None, choices=_native.ISA_NAMES)
    parser.add_argument("--threads", type=int, nargs="*", default=None)
    parser.add_argument("--json", type=Path, help="write the kernels' numbers there")
    parser.add_argument("--most-s", type=float, default=math.inf, help="for the kernels, about")
    parser.add_argument("--kernels-only", action="store_true", help="not the engine's own cost")
    arguments = parser.parse_args()
    measure_all(arguments)
    if arguments.kernels_only:
        return
    print("\nthe engine's cost on this processor, microseconds a block, forward and backward")
    for offload in ("none", "weights"):
        plain, added = engine_overhead_us(offload, 5 * arguments.rounds)
        print(f"offload {offload:8} {added:8.0f} beside {plain:.0f} of the plain model")


if __name__ == "__main__":
    main()
