"""The native optimizer against the memory's own speed, and the engine's own cost.

    make bench-cpu

Each kernel is timed beside a stream that reads and writes what it does and computes nothing, so
that its rate is the most that memory allows, and beside processes that update what their core's
cache holds (in_cache.py): the most that arithmetic allows, at the clock that the cores have behind
the update. All take turns, on the same cores: those that did most in their caches before, of a
machine that others share. Such a machine changes within milliseconds, so a round goes over the
arrays part by part, and on each part all kernels follow each other, every one on the part behind
that of the one before: none finds in a cache what another left there. Rates are medians of parts
and rounds, and ratios medians of what followed each other.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import in_cache
import torch
from kernel_rows import FP32, ROWS, STATE_BLOCK, Part, Row, arena_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fluxtrain
from fluxtrain import _native

BLOCKS, WIDTH, BATCH = 24, 64, 8
LEAST_S = 5.0  # of rounds, with each number of threads
IN_CACHE_S = 0.05  # of each kind and round
LEGEND = """{million:.0f} M elements, {processors} processors
/stream: beside a kernel that reads and writes the same and computes nothing (0.95 is asked for);
/cache: of what arithmetic allows, from what fits a core's cache; /fp32 states: beside those
(1.5 is asked for with 8-bit states, or 0.95 of /cache)"""
PARTS = 8  # of the arrays with one thread, fewer with more: a pass over one takes some ms


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


def faster(before: Sequence[float], after: Sequence[float]) -> float:
    """How many times: of pairs, since what other programs do changes between them."""
    return statistics.median(old / new for old, new in zip(before, after, strict=True))


Seconds = Mapping[str, Sequence[float]]  # an element, by row, in the order in which they were
Clocks = Sequence[Sequence[float]]  # by round, of each part


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

    def per_s(self, kind: str, clocks: Clocks) -> list[float]:
        """The rates of a kind in the rounds that count, all but the first one, at these clocks."""
        return [rates[kind].at(clock) for rates, clock in self._pairs(clocks)]

    def clock_of(self, kind: str, clocks: Clocks) -> float | None:
        """The clock beside that in the caches; None where that is not known."""
        beside = [clock / rates[kind].clock for rates, clock in self._pairs(clocks)]
        return statistics.median(beside) if beside else None

    def _pairs(self, clocks: Clocks) -> list[tuple[in_cache.Rates, float]]:
        rounds = zip(self.rounds[1:], clocks, strict=False)
        return [(rates, clock) for rates, of_round in rounds for clock in of_round]


@dataclass(frozen=True)
class Timed:
    """One row over one part, and the clock behind each of its runs."""

    row: Row
    part: Part
    run: Callable[[], object]
    clocks: list[float]

    @classmethod
    def of(cls, row: Row, part: Part, threads: int) -> Timed:
        run = partial(_native.kernel(row.kernel), *row.arguments(part, threads))
        return cls(row, part, run, [])

    def look(self) -> None:
        if self.row.in_cache:
            self.clocks.append(in_cache.clock())


def in_turn(arena: Part, threads: int) -> list[Timed]:
    """All passes over all parts, in the order of a round. A stream comes twice: as its kernel, the
    second one finds in the caches what a pass over such arrays left there, which has to be written
    back first. The number of parts is a power of two, and passes go on by an odd one, so that each
    comes to all."""
    count = 1 << max(1, PARTS // threads).bit_length() - 1
    while count > 1 and arena.n < count * STATE_BLOCK:  # so few that a part would be empty
        count //= 2
    parts = arena.cut(count)
    passes = [row for row in ROWS for _ in range(2 if row.is_stream else 1)]
    further = len(passes) | 1
    return [
        Timed.of(row, parts[(first * further + behind) % count], threads)
        for first in range(count)
        for behind, row in enumerate(passes)
    ]


def counted(timed: Sequence[Timed], row: Row) -> list[int]:
    """Which of the passes in turn are those of a row that count."""
    mine = [at for at, one in enumerate(timed) if one.row is row]
    return mine[1::2] if row.is_stream else mine


def measure(
    arena: Part, threads: int, rounds: int, most_s: float = math.inf
) -> list[dict[str, Any]]:
    """Elements a second of each kernel, against its stream's, against what arithmetic allows and
    against AdamW with fp32 states."""
    timed = in_turn(arena, threads)
    calls = [call for one in timed for call in (one.run, one.look)]
    with in_cache.waiting(threads, IN_CACHE_S, _native.isa()) as in_caches:
        arithmetic = Arithmetic(threads, in_caches)
        taken = turns([*calls, arithmetic], rounds, LEAST_S, most_s)[:-1:2]
    seconds, clocks = {}, {}
    for row in ROWS:
        mine = counted(timed, row)
        each = [[s / timed[at].part.n for s in taken[at]] for at in mine]
        seconds[row.name] = [s for of_round in zip(*each, strict=True) for s in of_round]
        looked = (timed[at].clocks[1:] for at in mine)  # not in the first round
        clocks[row.name] = list(zip(*looked, strict=True))
    return [numbers(threads, row, seconds, clocks[row.name], arithmetic) for row in ROWS]


def numbers(
    threads: int, row: Row, seconds: Seconds, clocks: Clocks, arithmetic: Arithmetic
) -> dict[str, Any]:
    """What is known of one kernel."""
    element_s = statistics.median(seconds[row.name])
    in_caches = arithmetic.per_s(row.in_cache, clocks) if row.in_cache else []
    shares = [1 / s / per_s for s, per_s in zip(seconds[row.name], in_caches, strict=False)]
    return {
        "isa": _native.isa(),
        "threads": threads,
        "name": row.name,
        "per_s": 1 / element_s,
        "bytes_per_s": row.element_bytes / element_s,
        "of_stream": faster(seconds[row.stream], seconds[row.name]) if row.stream else None,
        "in_cache_per_s": statistics.median(in_caches) if in_caches else None,
        "of_cache": statistics.median(shares) if shares else None,
        "clock_beside_cache": arithmetic.clock_of(row.in_cache, clocks) if row.in_cache else None,
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
    fluxtrain.wrap(wrapped, device="cpu", offload=offload, chunk_rows=BATCH)
    x = torch.randn(BATCH, WIDTH)

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
    arena = arena_of(int(arguments.million * 1e6))
    print(LEGEND.format(million=arena.n / 1e6, processors=everything))
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
    print(
        "\nthe engine's cost on this processor, microseconds a block, forward and backward: the "
        f"same for a block of any size (these are {WIDTH} wide; one of a 3 B model with 8 rows "
        "of 1024 tokens takes an H200 about 8,000)"
    )
    for offload in ("none", "weights"):
        plain, added = engine_overhead_us(offload, 5 * arguments.rounds)
        print(f"offload {offload:8} {added:8.0f} beside {plain:.0f} of the plain model")


if __name__ == "__main__":
    main()
