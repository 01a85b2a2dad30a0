"""The table of the GPU benchmarks judges what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import bench_table
from measured_on import bus_line, command, commands, machine_line
from verdicts import Slow, beside, counted, judged, slow_references

from fluxtrain.events.answers.machine import Machine

BENCH = Path(__file__).parents[2] / "bench"

ROWS: list[dict[str, Any]] = yaml.safe_load((BENCH / "gpu_rows.yaml").read_text())
EXACT = {"states": "fp32", "in_backward": False}


def found(tokens_per_s: float, losses: list[float]) -> dict[str, Any]:
    return {
        "step_s": 0.5, "tokens_per_s": tokens_per_s, "tflops": 300.0, "nvml_gib": 22.0,
        "host_gib": 26.0, "losses": losses,
    }  # fmt: skip


def test_every_row_names_rows_that_come_before_it() -> None:
    seen: set[str] = set()
    for row in ROWS:
        for other in (row.get("against"), row.get("losses")):
            assert other is None or other in seen, row["name"]
        assert row["name"] not in seen
        seen.add(row["name"])
    for row in ROWS:
        assert seen.issuperset(row.get("times", {})), row["name"]


def test_every_row_of_fluxtrain_has_a_budget_and_a_loop_that_it_is_compared_with() -> None:
    for row in ROWS:
        if "engine" not in row:
            assert {"budget", "against"} <= set(row), row["name"]


@pytest.mark.parametrize(("share", "word"), [(0.91, "met"), (0.89, "MISSED")])
def test_a_share_of_another_loop_is_met_or_missed(share: float, word: str) -> None:
    row = {"name": "a", "against": "b", "least": 0.90}
    rows = {"a": found(1000 * share, []), "b": found(1000, [])}
    assert beside(row, rows) == f"{share:.1%} of b"
    assert judged(row, rows) == f"90% of b: {word}"


@pytest.mark.parametrize(("last", "word"), [(8.007, "same"), (8.009, "NOT the same")])
def test_losses_are_compared_over_the_first_twenty_steps(last: float, word: str) -> None:
    reference = [9.0] * 19 + [8.0, 1.0]
    row = {"name": "a", "losses": "b", "most_s": 0.4}
    rows = {"a": found(1, [9.0] * 19 + [last, 5.0]), "b": found(1, reference)}
    wanted = judged(row, rows)
    assert f"losses {word}" in wanted
    assert "0.40 s: MISSED" in wanted


@pytest.mark.parametrize("at", [0, 5])
def test_a_loss_that_is_no_number_is_not_the_same(at: int) -> None:
    rows = {"a": found(1, [9.0] * 20), "b": found(1, [9.0] * 20)}
    rows["a"]["losses"][at] = float("nan")
    assert "losses NOT the same (nan)" in judged({"name": "a", "losses": "b"}, rows)


def test_losses_of_fewer_steps_say_over_how_many() -> None:
    rows = {"a": found(1, [9.0] * 12), "b": found(1, [9.0] * 20)}
    assert judged({"name": "a", "losses": "b"}, rows) == "losses same over 12 steps (0.0e+00)"


def test_every_row_has_three_timed_steps_and_losses_are_of_its_own_batch() -> None:
    by_name = {row["name"]: row for row in ROWS}
    for row in ROWS:
        assert row["steps"] - 1 - 3 >= 3, row["name"]  # the first three and the last do not count
        if "losses" in row:
            reference = by_name[row["losses"]]
            assert reference["engine"] == "resident-fp32"
            assert (row["shape"], row["batch"]) == (reference["shape"], reference["batch"])
            unclipped = "--unclipped" in reference.get("flags", ())
            assert unclipped == ("--in-backward" in row.get("flags", ())), row["name"]
            assert row["steps"] <= reference["steps"]


def test_a_row_that_failed_says_why_and_the_others_stand() -> None:
    rows = {"a": {"error": "not done in 240 s"}, "b": found(10, [])}
    assert "not done in 240 s" in bench_table.line({"name": "a"}, rows)
    assert bench_table.line({"name": "b", "against": "a"}, rows).startswith("| b | 0.500 | 10 |")


@pytest.mark.parametrize(("factor", "word"), [(2.61, "met"), (2.59, "MISSED")])
def test_a_multiple_of_a_peer_is_judged_where_the_peer_ran(factor: float, word: str) -> None:
    row = {"name": "a", "times": {"peer": 2.6}}
    rows = {"a": found(1000 * factor, []), "peer": found(1000, [])}
    assert beside(row, rows) == f"{factor:.2f}x peer"
    assert judged(row, rows) == f"2.6x of peer: {word}"
    rows["peer"] = {"error": "deepspeed is not installed"}
    assert beside(row, rows) == ""
    assert judged(row, rows) == "2.6x of peer: not judged, it has no result"


@pytest.mark.parametrize(
    ("nvml_gib", "told"),
    [
        (23.0, "met (23.00)"),
        (23.04, "MISSED (23.04)"),
        (0.0, "not judged, NVML saw nothing (0.00)"),
    ],
)
def test_the_memory_of_the_process_is_held_to_the_budget(nvml_gib: float, told: str) -> None:
    rows = {"a": found(1, []) | {"nvml_gib": nvml_gib}}
    assert judged({"name": "a", "budget": 23}, rows) == f"23 GiB: {told}"


@pytest.mark.parametrize(
    ("mode", "most"),
    [
        (EXACT, 14.5),
        (EXACT | {"in_backward": True}, 12.5),
        (EXACT | {"states": "8bit"}, 8.5),
        (EXACT | {"states": "8bit", "in_backward": True}, 8.5),
    ],
)
def test_host_bytes_are_judged_by_what_the_row_keeps_there(
    mode: dict[str, Any], most: float
) -> None:
    row = {"name": "a", "budget": 23}
    for taken, word in ((most, "met"), (most + 0.01, "MISSED")):
        rows = {"a": found(1, []) | mode | {"host_bytes_per_trained": taken}}
        assert f"; {most} bytes: {word} ({taken:.2f})" in judged(row, rows)


@pytest.mark.parametrize(("step_s", "void"), [(0.409, False), (0.410, True)])
def test_rows_beside_a_loop_that_is_slow_here_are_void(step_s: float, void: bool) -> None:
    wanted = [
        {"name": "loop", "reference_s": 0.39},
        {"name": "a", "against": "loop", "least": 0.9, "most_s": 0.6, "budget": 23},
        {"name": "b", "most_s": 0.6},
    ]
    rows = {name: found(1000, []) for name in "ab"} | {"loop": found(1000, [])}
    rows["loop"]["step_s"] = step_s
    slow = slow_references(wanted, rows)
    loop, compared, other = (judged(row, rows, slow) for row in wanted)
    assert ("void" in loop) == void
    assert other == "0.60 s: met"
    assert "23 GiB: met" in compared  # bytes are the same on a slow machine
    if void:
        assert compared.startswith("VOID, for loop took 0.410 s here; ")
        assert "0.60 s: VOID; 90% of loop: VOID" in compared
    else:
        assert "0.60 s: met; 90% of loop: met" in compared


@pytest.mark.parametrize(("tokens_per_s", "word"), [(215, "met"), (214, "MISSED")])
def test_a_multiple_of_a_loop_that_is_slow_here_is_of_what_it_is_known_to_do(
    tokens_per_s: int, word: str
) -> None:
    wanted = [
        {"name": "loop", "reference_s": 0.39},
        {"name": "other", "reference_s": 1.96},
        {"name": "a", "against": "loop", "least": 0.2, "most_s": 0.6, "times": {"other": 2.0}},
    ]
    rows = {"a": found(tokens_per_s, []), "loop": found(1000, []), "other": found(100, [])}
    rows["loop"]["step_s"], rows["other"]["step_s"] = 0.39, 2.1
    slow = slow_references(wanted, rows)
    told = judged(wanted[2], rows, slow)
    assert told == f"0.60 s: met; 20% of loop: met; 2.0x of other with its known 1.96 s: {word}"
    assert "SLOWER" in judged(wanted[1], rows, slow)
    times = tokens_per_s / (100 * 2.1 / 1.96)
    told = beside(wanted[2], rows, slow)
    assert told.endswith(f"% of loop, {times:.2f}x other with its known 1.96 s")


def test_bytes_by_trained_parameters_are_shown_beside_those_at_home() -> None:
    figures = {"host_bytes_per_trained": 9.312, "host_bytes_per_on_host": 14.92}
    apart = {"block_inputs_on_host_gib": 1.12}
    told = bench_table.line({"name": "a"}, {"a": found(1, []) | figures | apart})
    assert "| 26.0 GiB | 1.1 GiB | 9.31 (14.92) |" in told
    assert told.count("|") == bench_table.HEAD.splitlines()[0].count("|")


def test_plans_and_bounds_stand_below_the_table() -> None:
    plan = {
        "offload": "max", "device_groups": 13, "resident_blocks": 2, "chunk_rows": 8,
        "activations": "host", "blocks_without_recompute": 1, "predicted_step_s": 0.4986,
        "bound": "computation 402 ms of 419 ms",
    }  # fmt: skip
    rows = {"a": found(10, []) | plan, "b": found(9, [])}
    wanted = [{"name": name} for name in "abc"]
    parts = bench_table.section("Today.", wanted, rows).split("\n\n")
    assert parts[0] == "Today. Not run: c, kernels."
    assert parts[1] == "**No target was judged.**"
    assert parts[2].splitlines()[2].startswith("| a |")
    assert "groups" not in parts[2]
    assert parts[4].startswith("- `a`: max, 13 groups and 2 blocks' weights")
    assert parts[4].endswith("0.499 s predicted. Bound: computation 402 ms of 419 ms.")


def test_an_embedding_that_lives_on_the_gpu_does_not_come_by_rows() -> None:
    plan = {
        "offload": "none", "device_groups": 38, "resident_blocks": 0, "chunk_rows": 16,
        "activations": "device", "blocks_without_recompute": 27, "embedding": "rows",
        "predicted_step_s": 1.2,
    }  # fmt: skip
    assert "by rows" not in bench_table.plan_line({"name": "a"}, plan)
    assert "embedding by rows" in bench_table.plan_line({"name": "a"}, plan | {"offload": "max"})


def test_an_engine_that_is_not_installed_is_not_run(tmp_path: Path) -> None:
    row = {"name": "a", "needs": "no_such_package"}
    assert bench_table.measured(row, tmp_path, 1.0) == {"error": "no_such_package is not installed"}
    assert list(tmp_path.iterdir()) == []


def test_targets_are_counted_and_those_not_met_named() -> None:
    wanted = [{"name": "a", "most_s": 0.6}, {"name": "b", "most_s": 0.4}]
    rows = {"a": found(1, []), "b": found(1, [])}
    assert counted(bench_table.targets(wanted[:1], rows, {})) == "All 1 targets are met."
    wanted += [{"name": "c", "against": "b", "least": 0.9}, {"name": "d", "budget": 23}]
    wanted += [{"name": "e", "against": "gone", "least": 0.9}]
    rows |= {"c": found(2, []), "d": {"error": "not done in 240 s"}, "e": found(1, [])}
    assert counted(bench_table.targets(wanted, rows, {"b": Slow("b", 9.0, 0.5)})) == (
        "Of 5 targets 1 are met. Missed: `b` (0.40 s: MISSED). Void: `c` (90% of b: VOID). "
        "Not judged: `d` (not done in 240 s), `e` (90% of gone: not judged, it has no result)."
    )


def test_host_memory_of_the_set_up_is_told_apart_where_it_is_the_larger() -> None:
    peaks = {"host_gib": 11.3, "host_setup_gib": 11.3, "host_training_gib": 8.2}
    told = bench_table.line({"name": "a"}, {"a": found(1, []) | peaks})
    assert "| 11.3 GiB (training 8.2) |" in told
    peaks["host_setup_gib"] = 8.0
    peaks["host_training_gib"] = 11.3
    told = bench_table.line({"name": "a"}, {"a": found(1, []) | peaks})
    assert "| 11.3 GiB |" in told


def test_rows_with_torchs_kernels_are_what_is_said_first() -> None:
    rows = {"a": found(1, []) | {"kernels": "torch"}, "b": found(1, []) | {"kernels": "liger"}}
    table = bench_table.section("Today.", [{"name": "a"}, {"name": "b"}], rows)
    assert table.startswith("**liger-kernel is not installed")
    assert "So ran: `a`." in table.splitlines()[0]
    del rows["a"]
    assert bench_table.section("Today.", [{"name": "b"}], rows).startswith("Today.")


def test_the_machine_is_told_with_its_processor_memory_and_driver() -> None:
    machine = Machine(
        cores=16, cpu_quota=None, cpu_name="A Processor", instruction_set="avx512",
        memory_total_bytes=126 << 30, memory_available_bytes=None, memory_limit_bytes=None,
        gpus=(), driver="580.1",
    )  # fmt: skip
    assert machine_line(machine, "A GPU (140 GiB)", "13.0", ["torch 2", "x 1"]) == (
        "A GPU (140 GiB), driver 580.1, CUDA 13.0, 16 cores (avx512) of A Processor, "
        "126 GiB of host memory. torch 2, x 1."
    )


def test_the_bus_is_that_of_the_first_row_that_rated_it() -> None:
    rates = {"h2d_pinned": 55.3e9, "d2h_pinned": 54.9e9}
    rows = {"a": found(1, []), "b": found(1, []) | {"per_s": rates}}
    assert bus_line(rows) == "Bus: 55.3 GB/s to the GPU, 54.9 GB/s back."
    assert bus_line({"a": found(1, [])}) == ""


def test_commands_are_told_once_and_without_the_folder() -> None:
    told = command(["--out", "/tmp/x", "--only", "a"])
    assert told == "python bench/bench_table.py --out DIR --only a"
    assert command(["--out=/tmp/x"]).endswith("--out=DIR")
    rows = {"a": {"command": told}, "b": {"command": told}, "c": {}}
    assert commands(rows) == f"    {told}"
