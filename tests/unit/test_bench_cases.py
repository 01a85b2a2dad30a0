"""The cases of predicted against measured are configurations that a run and transformers take."""

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

import bench_plan  # noqa: E402 - scripts beside the project, not a package

CASES = yaml.safe_load((BENCH / "plan_cases.yaml").read_text())
SHAPES = yaml.safe_load((BENCH / "shapes.yaml").read_text())
DOCS = bench_plan.DOCS.read_text()


def test_each_table_has_cases_and_a_place() -> None:
    assert set(CASES) == set(bench_plan.TABLES)
    for begin, end in bench_plan.MARKS.values():
        assert DOCS.count(begin) == DOCS.count(end) == 1


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
