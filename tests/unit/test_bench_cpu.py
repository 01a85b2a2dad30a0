"""The benchmark of the native kernels takes no longer than it may."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import bench_cpu
import in_cache
from bench_cpu import Arithmetic, Result, turns
from in_cache import Rate
from kernel_rows import ROWS, STATE_BLOCK, arena_of


def test_rounds_end_with_their_time_and_one_always_counts() -> None:
    slow = lambda: time.sleep(0.02)  # noqa: E731
    starts_s = time.perf_counter()
    assert len(turns([slow], 10_000, least_s=60.0, most_s=0.2)[0]) < 12
    assert time.perf_counter() - starts_s < 5.0
    assert [len(taken) for taken in turns([slow, slow], 9, most_s=-1.0)] == [1, 1]


def test_there_are_as_many_rounds_as_were_wished_and_more_for_the_least_time() -> None:
    quick = lambda: time.sleep(0.001)  # noqa: E731
    assert len(turns([quick], 5)[0]) == 5
    assert len(turns([quick], 5, least_s=0.2)[0]) > 5


def test_a_machine_that_gets_too_busy_for_caches_is_not_asked_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def too_busy() -> in_cache.Rates:
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("not done in time: the machine is busy")
        return {"8bit": Rate(1e9 * len(asked), 1.0)}

    arithmetic = Arithmetic(16, too_busy)
    for _ in range(5):
        arithmetic()
    assert len(asked) == 3
    assert arithmetic.per_s("8bit", [[1.0]] * 4) == [2e9]  # what was found counts
    assert "16 threads in their caches: not done in time" in capsys.readouterr().out


def test_the_first_round_in_caches_is_not_counted() -> None:
    rounds = iter([{"8bit": Rate(per_s, 4.0)} for per_s in (1.0, 2.0, 3.0)])
    arithmetic = Arithmetic(2, lambda: next(rounds))
    for _ in range(3):
        arithmetic()
    assert arithmetic.per_s("8bit", [[4.0], [4.0, 2.0]]) == [2.0, 3.0, 1.5]


def test_arithmetic_allows_less_where_the_clock_is_slower_beside_memory() -> None:
    arithmetic = Arithmetic(2, lambda: {"8bit": Rate(10.0, 4.0)})
    assert arithmetic.clock_of("8bit", []) is None  # nothing was measured
    for _ in range(3):
        arithmetic()
    assert arithmetic.per_s("8bit", [[3.0], [4.0]]) == [7.5, 10.0]
    assert arithmetic.clock_of("8bit", [[3.0], [4.0]]) == 0.875


def test_kernels_are_compared_with_what_arithmetic_allows_in_the_same_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine whose clock halves from round to round changes no share, nor does its memory where
    only that slows the clock."""
    speeds = iter(2.0**-n for n in range(100))
    speed, arena = [1.0], arena_of(bench_cpu.PARTS * STATE_BLOCK)

    def measure() -> in_cache.Rates:
        speed[0] = next(speeds)
        return dict.fromkeys(in_cache.KINDS, Rate(speed[0] * 4e9, 2 * speed[0]))

    def in_rounds(
        runs: list[Callable[[], object]], rounds: int, least_s: float, most_s: float
    ) -> list[list[float]]:
        seconds: list[list[float]] = [[] for _ in runs]
        for count in range(4):
            runs[-1]()
            for run in runs[1:-1:2]:  # what looks at the clock behind each kernel
                run()
            for taken in seconds if count else ():
                taken.append(arena.n / bench_cpu.PARTS / (speed[0] * 1e9))
        return seconds

    @contextmanager
    def waiting(*_: object) -> Iterator[Callable[[], in_cache.Rates]]:
        yield measure

    monkeypatch.setattr(in_cache, "waiting", waiting)
    monkeypatch.setattr(in_cache, "clock", lambda: speed[0])
    monkeypatch.setattr(bench_cpu, "turns", in_rounds)
    rows = {row["name"]: row for row in bench_cpu.measure(arena, 1, 3)}
    assert rows["adamw, 8-bit states"]["of_cache"] == pytest.approx(0.5)
    assert rows["adamw, 8-bit states"]["in_cache_per_s"] == pytest.approx(0.5e9)
    assert rows["adamw, 8-bit states"]["clock_beside_cache"] == pytest.approx(0.5)
    assert rows["adamw, f32 grad"]["of_cache"] is None


@pytest.mark.parametrize(("threads", "count"), [(1, 8), (2, 4), (3, 2), (8, 1), (64, 1)])
def test_kernels_go_over_all_of_the_arrays_in_a_round_each_on_another_part_than_the_one_before(
    threads: int, count: int
) -> None:
    arena = arena_of(8 * STATE_BLOCK + 7)
    timed = bench_cpu.in_turn(arena, threads)
    starts = [
        (one.part.tensors["p"].data_ptr() - arena.tensors["p"].data_ptr()) // 4 for one in timed
    ]
    assert len(set(starts)) == count
    assert all(start % STATE_BLOCK == 0 for start in starts)
    for row in ROWS:
        mine = bench_cpu.counted(timed, row)
        assert sum(timed[at].part.n for at in mine) == arena.n
        assert {starts[at] for at in mine} == set(starts)  # each part once
        assert sum(timed[at].part.tensors["m_scale"].numel() for at in mine) == 9
        behind = row.name if row.is_stream else row.stream  # of a stream, another pass
        if behind and "8-bit" not in row.name:
            assert all(timed[at - 1].row.name == behind for at in mine)
    if count > 2:  # of two, one may come twice: each is too large for a cache
        assert all(start != before for start, before in itertools.pairwise(starts))


@pytest.mark.parametrize("n", [1, 1000, 2047])
def test_no_part_is_empty(n: int) -> None:
    assert all(one.part.n > 0 for one in bench_cpu.in_turn(arena_of(n), 1))


def test_results_are_whole_after_every_part(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = Result(path, {"isa": "avx2"})
    result.rows.append({"threads": 1})
    result.write()
    first = json.loads(path.read_text())
    assert first == {"isa": "avx2", "rows": [{"threads": 1}], "done": False}
    result.rows.append({"threads": 2})
    result.write(done=True)
    last = json.loads(path.read_text())
    assert last["done"] and last["rows"] == [{"threads": 1}, {"threads": 2}]
    assert [one.name for one in tmp_path.iterdir()] == ["kernels.json"]
