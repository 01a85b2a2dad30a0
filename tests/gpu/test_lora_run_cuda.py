"""Runs of lora and qlora on a GPU through the trainer: planned, trained, resumed, saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fluxtrain.config.schema import validate
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.run import train
from tests.on_cards import saved_with_demo_tokenizer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_with_demo_tokenizer(tmp_path_factory.mktemp("llama") / "model")


def run(folder: Path, run_dir: Path, method: str, steps: int, resume: bool = False) -> list[Any]:
    config = validate(
        {
            # liger's kernels stay in a process: the next load would run them without a GPU
            "model": {"path": str(folder), "kernels": "torch"},
            "data": {"path": "demo", "sequence_length": 256},
            "method": {"name": method, "rank": 8},
            "placement": {"offload": "weights", "device_groups": 0, "chunk_rows": 4},
            "train": {
                "steps": steps,
                "batch_rows": 8,
                "checkpoint_every": 4,
                "schedule": "constant",
            },
        }
    )
    target = locate(str(run_dir) if resume else None, None if resume else run_dir, config)
    train(config, target)
    return list(read_events(run_dir / "events.ndjson"))


def losses(events: list[Any]) -> list[float]:
    return [event.loss for event in events if isinstance(event, ev.StepFinished)]


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_learns_and_resumes_with_the_same_losses(
    method: str, model_folder: Path, tmp_path: Path
) -> None:
    whole = losses(run(model_folder, tmp_path / "whole", method, 8))
    run(model_folder, tmp_path / "parts", method, 4)
    parts = losses(run(model_folder, tmp_path / "parts", method, 8, resume=True))
    assert whole[-1] < whole[0]
    assert parts[-4:] == whole[-4:]
    one, other = (
        load_file(tmp_path / name / "model" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert one and all(torch.equal(one[name], other[name]) for name in one)
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    packed = {rows["storage"] for rows in plan["placement"]}
    assert ("nf4-double" in packed) == (method == "qlora")
    checked = json.loads((tmp_path / "whole" / "result.json").read_text())["plan"]
    print(method, [(row["quantity"], row["predicted"], row["measured"]) for row in checked])
