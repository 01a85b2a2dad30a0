"""Weights that are pages of their files take no memory that a plan would have to give back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fluxtrain.methods.models import ModelSource, load_model
from fluxtrain.train.mapped import copied_bytes
from fluxtrain.train.placing import loaded_bytes

ModelFolder = Callable[..., Path]

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are listed in /proc"
)


def test_weights_in_the_dtype_of_their_file_are_its_pages(model_folder: ModelFolder) -> None:
    model = load_model(ModelSource(path=str(model_folder()))).model
    assert loaded_bytes(model) > 0
    assert copied_bytes(model) == 0


def test_converted_weights_are_copies(model_folder: ModelFolder) -> None:
    folder = str(model_folder())
    stored = next(load_model(ModelSource(path=folder)).model.parameters()).dtype
    other = "float32" if stored == torch.bfloat16 else "bfloat16"
    model = load_model(ModelSource(path=folder, dtype=other)).model
    assert copied_bytes(model) == loaded_bytes(model) > 0


def test_memory_without_a_file_on_a_disk_is_a_copy(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    start = model.weight.data_ptr()
    around = f"{start:x}-{start + model.weight.nbytes:x} rw-p 00000000 08:01 "
    maps = tmp_path / "maps"
    for line, expected in (
        ("7 /data/model.safetensors", model.bias.nbytes),
        ("7 /data/a name with blanks.safetensors", model.bias.nbytes),
        ("0 ", loaded_bytes(model)),
        ("7 /memfd:arena (deleted)", loaded_bytes(model)),
        ("7 /dev/shm/model.safetensors", loaded_bytes(model)),
    ):
        maps.write_text(f"{around}{line}\n")
        assert copied_bytes(model, maps) == expected, line
    assert copied_bytes(model, tmp_path / "nothing") == loaded_bytes(model)
