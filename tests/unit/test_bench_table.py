"""The table of the GPU benchmarks judges what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import bench_table  # noqa: E402 - a script beside the project, not a package


def found(tokens_per_s: float, losses: list[float]) -> dict[str, Any]:
    return {
        "step_s": 0.5, "tokens_per_s": tokens_per_s, "tflops": 300.0, "nvml_gib": 22.0,
        "host_gib": 26.0, "losses": losses,
    }  # fmt: skip


def test_every_row_names_rows_that_come_before_it() -> None:
    seen: set[str] = set()
    for row in yaml.safe_load((BENCH / "gpu_rows.yaml").read_text()):
        for other in (row.get("against"), row.get("losses")):
            assert other is None or other in seen, row["name"]
        assert row["name"] not in seen
        seen.add(row["name"])


@pytest.mark.parametrize(("share", "word"), [(0.91, "met"), (0.89, "MISSED")])
def test_a_share_of_another_loop_is_met_or_missed(share: float, word: str) -> None:
    row = {"name": "a", "against": "b", "least": 0.90}
    rows = {"a": found(1000 * share, []), "b": found(1000, [])}
    assert bench_table.judged(row, rows) == (f"{share:.1%} of b", f"90%: {word}")


@pytest.mark.parametrize(("last", "word"), [(8.007, "same"), (8.009, "NOT the same")])
def test_losses_are_compared_over_the_first_twenty_steps(last: float, word: str) -> None:
    reference = [9.0] * 19 + [8.0, 1.0]
    row = {"name": "a", "losses": "b", "most_s": 0.4}
    rows = {"a": found(1, [9.0] * 19 + [last, 5.0]), "b": found(1, reference)}
    _, wanted = bench_table.judged(row, rows)
    assert f"losses {word}" in wanted
    assert "0.40 s: MISSED" in wanted


def test_a_row_that_failed_says_why_and_the_others_stand() -> None:
    rows = {"a": {"error": "not done in 240 s"}, "b": found(10, [])}
    assert "not done in 240 s" in bench_table.line({"name": "a"}, rows)
    assert bench_table.line({"name": "b", "against": "a"}, rows).startswith("| b | 0.500 | 10 |")


def test_an_engine_that_is_not_installed_is_not_run(tmp_path: Path) -> None:
    row = {"name": "a", "needs": "no_such_package"}
    assert bench_table.measured(row, tmp_path, 1.0) == {"error": "no_such_package is not installed"}
    assert list(tmp_path.iterdir()) == []
