"""The benchmark of the native kernels takes no longer than it may."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from bench_cpu import Result, rates_in_cache, turns


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


def test_caches_are_left_out_where_no_time_is_left() -> None:
    assert rates_in_cache(16, left_s=5.0) == {}


def test_results_are_whole_after_every_part(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = Result(path, {"isa": "avx2"})
    result.rows.append({"threads": 1})
    result.write()
    first = json.loads(path.read_text())
    assert first == {"isa": "avx2", "rows": [{"threads": 1}], "in_cache_per_s": {}, "done": False}
    result.in_cache_per_s[1] = {"8bit": 1e9}
    result.write(done=True)
    last = json.loads(path.read_text())
    assert last["done"] and last["in_cache_per_s"] == {"1": {"8bit": 1e9}}
    assert [one.name for one in tmp_path.iterdir()] == ["kernels.json"]
