"""The benchmark of the native kernels: what it measures, judges and writes."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import bench_cpu
from bench_cpu import EIGHT_BIT, FP32, KERNELS, Arena, Kernel, measure, row_of


@pytest.mark.parametrize(
    ("kernel", "seconds", "stream_s", "every", "verdict"),
    [
        (FP32, 1.0, 0.96, False, "met"),
        (FP32, 1.0, 0.94, False, "missed"),
        (EIGHT_BIT, 0.6, 0.3, True, "met"),
        (EIGHT_BIT, 0.7, 0.69, True, "missed"),
        (EIGHT_BIT, 0.7, 0.69, False, ""),
    ],
)
def test_kernels_are_held_to_their_stream_and_8_bits_to_their_gain_with_all_threads(
    kernel: Kernel, seconds: float, stream_s: float, every: bool, verdict: str
) -> None:
    pairs = [(seconds, stream_s)] * 3
    row = row_of(kernel, 1000, 2, pairs, [1.0] * 3, judges_gain=every)
    assert row["verdict"] == verdict
    assert bool(row["wanted"]) == bool(verdict)
    assert row["per_s"] == pytest.approx(1000 / seconds)
    assert kernel.name in bench_cpu.line_of(row)


def test_every_kernel_and_its_stream_run_over_the_arena() -> None:
    rows = measure(Arena(5000), 1, rounds=1)
    assert [row["name"] for row in rows] == [kernel.name for kernel in KERNELS]
    for row in rows:
        assert 0 < row["seconds"] < math.inf and row["of_stream"] > 0
