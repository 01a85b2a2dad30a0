"""An adapter, or a part of its configuration, that changes nothing is told once; no other is."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.test_adapter_configs import edited
from tests.engine.used_models import opened

LAYERS = ["q_proj", "v_proj"]  # of two blocks: four layers
IDLE = "changes nothing of its base: "
TRAINED = "; name a trained one, or copy or download it again"


@pytest.fixture
def base(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama")


@pytest.fixture
def made(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """`made(**settings)`: an adapter of four layers."""

    def make(**settings: Any) -> Path:
        return make_adapter(base, tmp_path / "adapter", **{"target_modules": LAYERS, **settings})

    return make


@pytest.fixture
def notes(
    caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], list[str]]:
    """`notes(adapter)`: what opening it, exporting it and merging it warn of, each the same."""

    def said(use: Callable[[], Any]) -> list[str]:
        caplog.clear()
        use()
        return [message.removeprefix("note: ") for message in caplog.messages]

    def told(adapter: Path) -> list[str]:
        to = tmp_path_factory.mktemp("exported")
        with caplog.at_level(logging.WARNING, "fluxtrain"):
            found = said(lambda: used(adapter))
            assert found == said(lambda: exported(adapter, to=to / "merged"))
            assert found == said(lambda: exported(adapter, to=to / "alone", merge=False))
        return found

    return told


def used(adapter: Path) -> None:
    with opened(adapter):
        pass


def zeroed(adapter: Path, part: str) -> Path:
    """Let the tensors with `part` in their names hold zeros."""
    path = adapter / "adapter_model.safetensors"
    tensors = {n: t * (part not in n) for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return adapter


def test_a_scale_of_zero_is_told(made: Callable[..., Path], notes: Any) -> None:
    adapter = made()
    path = edited(adapter, lora_alpha=0)
    scaled = f"{path.name} scales it by 0 (lora_alpha)"
    assert notes(adapter) == [f"the adapter {adapter} {IDLE}{scaled}{TRAINED}"]


def test_matrices_of_zeros_are_told(made: Callable[..., Path], notes: Any) -> None:
    adapter = zeroed(made(), "lora_B")
    zeros = "all its B matrices hold zeros, as before any training"
    assert notes(adapter) == [f"the adapter {adapter} {IDLE}{zeros}{TRAINED}"]


@pytest.mark.parametrize(
    ("settings", "zeros"),
    [
        ({}, "q_proj.lora_B"),  # not all
        ({"alpha_pattern": {"q_proj": 0}}, "nothing"),
        ({"lora_alpha": 0, "alpha_pattern": {"q_proj": 8}}, "nothing"),
        ({"use_dora": True}, "lora_B"),  # magnitudes were trained
        ({"modules_to_save": ["lm_head"]}, "lora_B"),
        ({"trainable_token_indices": [5]}, "lora_B"),
    ],
)
def test_an_adapter_that_changes_something_is_not_told(
    settings: dict[str, Any], zeros: str, made: Callable[..., Path], notes: Any
) -> None:
    assert notes(zeroed(made(**settings), zeros)) == []


def test_a_program_that_reads_json_finds_the_note_once_on_standard_error(
    made: Callable[..., Path],
    tmp_path: Path,
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    adapter = made()
    edited(adapter, lora_alpha=0)
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 20)
    command = ["evaluate", adapter, tmp_path / "text.txt", "--device", "cpu", "--json"]
    done = fluxtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")
    assert done.stderr.count("note: ") == done.stderr.count(IDLE) == 1
