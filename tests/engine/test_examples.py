"""The files in examples/: each is read in the shape that its README line says, and trains."""

from __future__ import annotations

import re
import subprocess
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
    "tools.jsonl": ("messages", []),
    "columns.jsonl": ("completion", ["data.columns={prompt: question, completion: answer}"]),
}


def test_every_file_stands_in_the_readme() -> None:
    named = set(
        re.findall(r"`([\w.]+\.(?:txt|jsonl|json|csv))`", (EXAMPLES / "README.md").read_text())
    )
    there = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "run.yaml"}
    assert there == set(SHAPES) == named


@pytest.mark.parametrize("name", SHAPES)
def test_an_example_is_read_in_its_shape_and_learnt(name: str) -> None:
    shape, sets = SHAPES[name]
    sets = [f"data.path={EXAMPLES / name}", *sets]
    found = inspection.inspect(load_config(EXAMPLES / "run.yaml", sets))
    assert found.files[0].shape == shape
    assert found.sampled_documents == 24 and found.is_whole
    assert found.cut_documents_share == 0 or shape == "messages" or name == "text.txt"
    learnt = "".join(piece.text for piece in found.samples[0].pieces if piece.learnt)
    assert "grinds grain between two stones" in learnt
    assert "What is a mill" not in learnt


def test_the_command_in_the_readme_trains(
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    sets: list[Any] = ["--set", f"data.path={EXAMPLES / 'alpaca.json'}"]
    done = fluxtrain("train", EXAMPLES / "run.yaml", *sets, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()
