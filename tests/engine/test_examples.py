"""The files in examples/: each is read in the shape that its README line says, and trains."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.commands import inspection
from fluxtrain.config.schema import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"

SHAPES: dict[str, tuple[str, list[str]]] = {
    "text.txt": ("text", []),
    "titles.jsonl": ("text", []),
    "completion.jsonl": ("completion", []),
    "table.csv": ("completion", []),
    "alpaca.json": ("alpaca", []),
    "sharegpt.jsonl": ("sharegpt", []),
    "messages.jsonl": ("messages", []),
    "turns.jsonl": ("messages", []),
    "pairs.jsonl": ("messages", []),
    "tools.jsonl": ("messages", []),
    "columns.jsonl": ("completion", ["data.columns={prompt: question, completion: answer}"]),
}

FEW_STEPS = ("--steps", "5")
ADAPTERS = ("lora.yaml", "qlora.yaml", "trl_sft.py")


def test_every_file_stands_in_the_readme() -> None:
    named = set(
        re.findall(r"`([\w.]+\.(?:txt|jsonl|json|csv))`", (EXAMPLES / "README.md").read_text())
    )
    beside = {"README.md", "run.yaml", "zero_to_hero.ipynb", *ADAPTERS}
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - beside
    assert there == set(SHAPES) == named


@pytest.mark.parametrize("name", SHAPES)
def test_an_example_is_read_in_its_shape_and_trained_on(name: str) -> None:
    shape, sets = SHAPES[name]
    sets = [f"data.path={EXAMPLES / name}", *sets]
    found = inspection.inspect(load_config(EXAMPLES / "run.yaml", sets))
    assert found.files[0].shape == shape
    assert found.sampled_documents == 24 and found.is_whole
    assert found.cut_documents_share == 0 or shape == "messages" or name == "text.txt"
    trained = "".join(piece.text for piece in found.samples[0].pieces if piece.trained)
    assert "grinds grain between two stones" in trained
    assert "What is a mill" not in trained


def test_the_command_in_the_readme_trains(
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    sets: list[Any] = ["--set", f"data.path={EXAMPLES / 'alpaca.json'}", *FEW_STEPS]
    done = fluxtrain("train", EXAMPLES / "run.yaml", *sets, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize("name", ["lora.yaml", "qlora.yaml"])
@pytest.mark.thinned(1)
def test_adapters_are_trained_and_merged_by_two_commands(
    name: str, fluxtrain: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert f"`{name}`" in (EXAMPLES / "README.md").read_text()
    sets: list[Any] = ["--set", f"data.path={EXAMPLES / 'messages.jsonl'}", *FEW_STEPS]
    done = fluxtrain("train", EXAMPLES / name, *sets, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    merged = fluxtrain("export", "last", "--merge", "--device", "cpu")
    assert merged.returncode == 0, merged.stderr
    assert "mean KL divergence" in merged.stdout
    assert len(list((tmp_path / "runs").glob("*/merged/config.json"))) == 1


@pytest.mark.slow
def test_the_example_of_trl_trains_an_adapter(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    arguments = [model_folder("llama"), tmp_path / "out", "--device", "cpu", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "trl_sft.py", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
