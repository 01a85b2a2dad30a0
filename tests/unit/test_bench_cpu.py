"""The benchmark of the native kernels: what it measures, judges and writes."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import bench_cpu
from bench_cpu import EIGHT_BIT, FP32, KERNELS, Arena, Kernel, measure, row_of

from fluxtrain import _native


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[tuple[int, bool]]:
    """Calls take these seconds by kernel, half as streams, and in the first round ten times."""
    calls: list[tuple[int, bool]] = []

    def seconds_of(args: _native.AdamWArgs, *, moves_only: bool) -> float:
        kind = next(i for i, one in enumerate(KERNELS)
                    if (one.states, one.pass_) == (args.state_format, args.pass_))  # fmt: skip
        slow = 10.0 if len(calls) < 2 * len(KERNELS) else 1.0
        calls.append((kind, moves_only))
        return slow * seconds[kind] / (2 if moves_only else 1)

    monkeypatch.setattr(bench_cpu, "seconds_of", seconds_of)
    return calls


def test_each_kernel_is_followed_by_its_stream_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = timed(monkeypatch, {i: i + 1.0 for i in range(len(KERNELS))})
    rows = measure(Arena(1000), 1, rounds=3)
    order = list(itertools.product(range(len(KERNELS)), (False, True)))
    assert calls == 4 * order
    assert [row["seconds"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {row["of_stream"] for row in rows} == {0.5}
    assert rows[0]["of_fp32"] == 1.0 and rows[-1]["of_fp32"] == pytest.approx(0.2)


def test_rounds_end_with_their_time_and_one_always_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = timed(monkeypatch, dict.fromkeys(range(len(KERNELS)), 1.0))
    measure(Arena(256), 1, rounds=100, most_s=-1.0)
    assert len(calls) == 2 * 2 * len(KERNELS)


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


def test_the_file_is_whole_and_says_when_nothing_is_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "kernels.json", []
    written = bench_cpu.write

    def write(to: Path | None, found: dict[str, Any]) -> None:
        written(to, found)
        seen.append(json.loads(path.read_text()))

    monkeypatch.setattr(bench_cpu, "write", write)
    arguments = ["--million", "0.01", "--threads", "1", "2", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_cpu.py", *arguments])
    before = _native.isa()
    try:
        bench_cpu.main()
    finally:
        _native.set_isa(before)
    assert [(found["done"], len(found["rows"])) for found in seen] == [(False, 5), (True, 10)]
