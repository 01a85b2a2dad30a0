"""The native AdamW against the memory's own speed.

    make bench-cpu

Each kernel is timed in turn with a stream that reads and writes what it does and computes nothing,
so that its share of the stream's rate is the share of what memory allows. Times are medians of
rounds, shares medians of what followed each other: other programs change a machine's speed.

Wanted are 95 % of the stream, and of 8-bit states 1.5 times the rate of fp32 ones with all threads:
with fewer their arithmetic takes the time, and nothing is asked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import GradientFormat, Pass, StateFormat, WeightFormat
from fluxtrain.core.adamw.hyper import Hyper, coefficients
from fluxtrain.core.adamw.reference import encode, rounding
from fluxtrain.core.device.arena import HostArena
from fluxtrain.plan.states import STATE_BLOCK

OF_STREAM, OF_FP32 = 0.95, 1.5  # what is wanted
HEAD = "isa      threads  kernel            ms   Gparam/s     GB/s  of stream  wanted"
Verdict = Literal["met", "missed", ""]


@dataclass(frozen=True)
class Kernel:
    """One update of split weights with a bf16 gradient, and what it moves for each element."""

    name: str
    element_bytes: int
    states: StateFormat = StateFormat.F32
    pass_: Pass = Pass.UPDATE


FP32, EIGHT_BIT = Kernel("fp32 states", 26), Kernel("8-bit states", 14, StateFormat.EIGHT_BIT)
KERNELS = (
    FP32,
    Kernel("weights alone", 18, pass_=Pass.WEIGHTS),
    Kernel("moments alone", 18, pass_=Pass.MOMENTS),
    Kernel("bf16 states", 18, StateFormat.BF16),
    EIGHT_BIT,
)


class Arena:
    """Weights, a gradient, and states in every format, in memory as a training has it."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        hi, lo = encode(torch.randn(n, generator=generator) * 0.02)
        grad = (torch.randn(n, generator=generator) * 1e-3).bfloat16()
        self.n = n
        self._shared = [_written(values) for values in (hi, lo, grad)]
        dtypes = {
            StateFormat.F32: torch.float32,
            StateFormat.BF16: torch.bfloat16,
            StateFormat.EIGHT_BIT: torch.uint8,
        }
        self._states = {
            states: [_written(torch.zeros(n, dtype=dtype)) for _ in "mv"]
            for states, dtype in dtypes.items()
        }
        self._scales = [torch.zeros(-(-n // STATE_BLOCK)) for _ in "mv"]

    def args(self, kernel: Kernel, threads: int) -> _native.AdamWArgs:
        """What the kernel takes, and the stream beside it."""
        hi, lo, grad = (flat.data_ptr() for flat in self._shared)
        m, v = (flat.data_ptr() for flat in self._states[kernel.states])
        m_scale, v_scale = (flat.data_ptr() for flat in self._scales)
        return _native.AdamWArgs(
            weight_format=WeightFormat.SPLIT_BF16,
            state_format=kernel.states,
            gradient_format=GradientFormat.BF16,
            pass_=kernel.pass_,
            threads=threads,
            n=self.n,
            weights=hi,
            lo=lo,
            m=m,
            v=v,
            m_scale=m_scale,
            v_scale=v_scale,
            gradient=grad,
            rounding=_native.RoundingArgs(*rounding(0, 1000, 0)),
            step=_native.AdamWStep(*coefficients(Hyper(lr=1e-4), 1000)),
        )


def _written(values: Tensor) -> Tensor:
    """The same in an arena, of huge pages where the system has any."""
    arena = HostArena(values.nbytes, pin=False)
    return arena.tensor(values.dtype, values.numel(), 0).copy_(values)


def seconds_of(args: _native.AdamWArgs, *, moves_only: bool) -> float:
    """Time one call."""
    start = time.perf_counter()
    _native.adamw(args, moves_only=moves_only)
    return time.perf_counter() - start


def measure(
    arena: Arena, threads: int, rounds: int, most_s: float = math.inf
) -> list[dict[str, Any]]:
    """Time kernels and streams in turn; a row a kernel. The first round does not count."""
    args = [arena.args(kernel, threads) for kernel in KERNELS]
    taken: list[list[tuple[float, float]]] = []  # by round and kernel: the kernel, its stream
    ends_s = time.perf_counter() + most_s
    while len(taken) < 2 or (len(taken) <= rounds and time.perf_counter() < ends_s):
        taken.append(
            [(seconds_of(a, moves_only=False), seconds_of(a, moves_only=True)) for a in args]
        )
    fp32_s = [of_round[KERNELS.index(FP32)][0] for of_round in taken[1:]]
    every = threads == processors()
    return [
        row_of(kernel, arena.n, threads, pairs, fp32_s, judges_gain=every)
        for kernel, pairs in zip(KERNELS, zip(*taken[1:], strict=True), strict=True)
    ]


def row_of(
    kernel: Kernel,
    n: int,
    threads: int,
    pairs: Sequence[tuple[float, float]],
    fp32_s: Sequence[float],
    *,
    judges_gain: bool,
) -> dict[str, Any]:
    """What is known of one kernel by its seconds and its stream's, round by round."""
    seconds = statistics.median(kernel_s for kernel_s, _ in pairs)
    of_stream = statistics.median(stream_s / kernel_s for kernel_s, stream_s in pairs)
    beside = zip(fp32_s, pairs, strict=True)
    of_fp32 = statistics.median(wide_s / kernel_s for wide_s, (kernel_s, _) in beside)
    if kernel is EIGHT_BIT:
        wanted = f"{OF_FP32}x fp32" if judges_gain else ""
        good = of_fp32 >= OF_FP32
    else:
        wanted, good = f"{OF_STREAM:.0%} of stream", of_stream >= OF_STREAM
    verdict: Verdict = "" if not wanted else "met" if good else "missed"
    return {
        "isa": _native.isa(),
        "threads": threads,
        "name": kernel.name,
        "seconds": seconds,
        "per_s": n / seconds,
        "bytes_per_s": n * kernel.element_bytes / seconds,
        "of_stream": of_stream,
        "of_fp32": of_fp32,
        "wanted": wanted,
        "verdict": verdict,
    }


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    told = f"{row['wanted']}: {row['verdict']}" if row["wanted"] else f"{row['of_fp32']:.2f}x fp32"
    if row["wanted"].endswith("fp32"):
        told += f" ({row['of_fp32']:.2f}x)"
    return (
        f"{row['isa']:8} {row['threads']:7d}  {row['name']:14} {row['seconds'] * 1e3:7.1f} "
        f"{row['per_s'] / 1e9:10.3f} {row['bytes_per_s'] / 1e9:8.1f} {row['of_stream']:10.1%}  "
        f"{told}"
    )


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Write what is known; the file is whole at any time."""
    if path is None:
        return
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(found, indent=1))
    beside.replace(path)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", type=float, default=32.0, help="elements, in millions")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", nargs="*", default=None, choices=_native.ISA_NAMES)
    parser.add_argument("--threads", type=int, nargs="*", default=None)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--most-s", type=float, default=math.inf, help="for all rounds, about")
    arguments = parser.parse_args()
    ends_s = time.perf_counter() + arguments.most_s
    most = processors()
    counts = sorted(set(arguments.threads or (1, max(1, most // 2), most)))
    cases = [(isa, n) for isa in arguments.isa or [_native.ISA_NAMES[-1]] for n in counts]
    arena = Arena(int(arguments.million * 1e6))
    found = {"million": arena.n / 1e6, "processors": most, "rows": []}
    print(f"{arena.n / 1e6:.0f} M parameters, {most} processors\n{HEAD}")
    for at, (isa, threads) in enumerate(cases):
        found["isa"] = _native.set_isa(isa)
        most_s = (ends_s - time.perf_counter()) / (len(cases) - at)
        for row in measure(arena, threads, arguments.rounds, most_s):
            print(line_of(row), flush=True)
            found["rows"].append(row)  # type: ignore[attr-defined]
        write(arguments.json, {**found, "done": at == len(cases) - 1})


if __name__ == "__main__":
    main()
