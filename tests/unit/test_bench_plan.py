"""The table of predictions: its cases, its budgets, and where it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from fluxtrain.config.schema import load_config

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import bench_plan  # noqa: E402 - a script beside the project, not a package

CASES = yaml.safe_load((BENCH / "plan_cases.yaml").read_text())
SHAPES = yaml.safe_load((BENCH / "shapes.yaml").read_text())
DOCS = bench_plan.DOCS.read_text()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_of_the_cases_leave_most_of_a_budget_free(device: str) -> None:
    cases = CASES[device]["cases"]
    assert all(("host_gib" if device == "cpu" else "budget_gib") in case for case in cases)
    filling = [case for case in cases if case["fills"]]
    assert 0 < len(filling) <= 2 * len(cases) // 3
    if device == "cpu":
        assert 2 * len(filling) == len(cases)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_table_takes_the_place_of_the_one_between_its_marks_alone(
    device: str, tmp_path: Path
) -> None:
    docs = tmp_path / "planner.md"
    before = bench_plan.DOCS.read_text(encoding="utf-8")
    docs.write_text(before, encoding="utf-8")
    bench_plan.write_docs("| new |", device, docs)
    begin, end = bench_plan.MARKS[device]
    head, rest = before.split(begin, 1)
    assert docs.read_text(encoding="utf-8") == (
        f"{head}{begin}\n\n| new |\n\n{end}{rest.split(end, 1)[1]}"
    )


def test_a_budget_says_what_it_limits_and_whether_that_was_done() -> None:
    case = {"host_gib": 6, "fills": False}
    assert bench_plan._budget({**case, "limited": True}) == "6 GiB host, mostly left free"
    assert bench_plan._budget({**case, "limited": False}) == "what is free"
    assert bench_plan._budget({"budget_gib": 23, "fills": True}) == "23 GiB"


def test_a_memory_group_is_gone_after_its_process() -> None:
    with bench_plan.memory_group(1.0) as group:
        if group is None:
            pytest.skip("control groups cannot be made here")
        files = ("memory.limit_in_bytes", "memory.max")
        (limit,) = (group / name for name in files if (group / name).exists())
        assert int(limit.read_text()) == 1 << 30
    assert not group.exists()
    with bench_plan.memory_group(None) as none:
        assert none is None


def test_each_table_has_cases_and_a_place() -> None:
    assert set(CASES) == set(bench_plan.TABLES)
    for begin, end in bench_plan.MARKS.values():
        assert DOCS.count(begin) == DOCS.count(end) <= 1


def test_a_new_table_stands_behind_those_that_are_there(tmp_path: Path) -> None:
    docs = tmp_path / "planner.md"
    last = bench_plan.MARKS["cpu"][1]
    docs.write_text(DOCS.split(last)[0] + last + "\n\nBehind.\n", encoding="utf-8")
    for table in ("| once |", "| twice |"):
        bench_plan.write_docs(table, "lora", docs)
    begin, end = bench_plan.MARKS["lora"]
    text = docs.read_text(encoding="utf-8")
    assert text.endswith(f"{last}\n\n{begin}\n\n| twice |\n\n{end}\n\nBehind.\n")


@pytest.mark.parametrize("table", bench_plan.TABLES)
def test_every_case_is_a_configuration_of_a_run(table: str, tmp_path: Path) -> None:
    shapes = CASES[table].get("shapes") or SHAPES
    for case in CASES[table]["cases"]:
        assert case["shape"] in shapes and "fills" in case
        given: dict[str, Any] = bench_plan.configuration(
            {**case, "model": "a-model"}, "cpu", 16, tmp_path / "text.txt"
        )
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
        assert load_config(tmp_path / "config.yaml").train.steps == 16


@pytest.mark.parametrize("table", ["families", "lora"])
def test_every_shape_is_a_model_of_the_size_in_its_name(table: str) -> None:
    for name, shape in CASES[table]["shapes"].items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(bench_plan.config_of(shape))
        said = name.rsplit("-", 1)[1].removesuffix("b")
        billions = 1.56 if said == "xl" else float(said)
        assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.12), name
