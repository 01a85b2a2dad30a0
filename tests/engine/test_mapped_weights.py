"""Weights that are pages of their files take no memory that a plan would have to give back, and
what loading will copy is known before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fluxtrain.core.memory.mapped import copied_bytes, resident_bytes
from fluxtrain.models.copies import Copied
from fluxtrain.models.loading import ModelSource, load_model
from tests.engine.conftest import VOCABULARY

ModelFolder = Callable[..., Path]

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are listed in /proc"
)


def test_weights_in_the_dtype_of_their_file_are_its_pages(model_folder: ModelFolder) -> None:
    model = load_model(ModelSource(path=str(model_folder()))).model
    assert resident_bytes(model) > 0
    assert copied_bytes(model) == 0


def test_converted_weights_are_copies(model_folder: ModelFolder) -> None:
    folder = str(model_folder())
    stored = next(load_model(ModelSource(path=folder)).model.parameters()).dtype
    other = "float32" if stored == torch.bfloat16 else "bfloat16"
    model = load_model(ModelSource(path=folder, dtype=other)).model
    assert copied_bytes(model) == resident_bytes(model) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_what_loading_will_copy_is_told_by_the_headers_of_the_files(
    model_folder: ModelFolder, family: str, dtype: str
) -> None:
    """With a head of its own, tied, and stored without the prefix of the model inside."""
    folder = model_folder(family)
    told: list[Copied] = []
    loaded = load_model(
        ModelSource(path=str(folder), dtype=dtype), lambda _, copied: told.append(copied)
    )
    held = copied_bytes(loaded.model)
    assert told == [Copied(weights_bytes=held)]
    assert held == (0 if dtype == "float32" else resident_bytes(loaded.model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_that_are_stored_one_by_one_are_copies_in_any_dtype(
    tiny: Callable[..., PreTrainedModel], tmp_path: Path, tokenizer_folder: Path, dtype: str
) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(tokenizer_folder, folder)
    model = tiny("mixtral", torch.bfloat16, vocab_size=VOCABULARY)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    told: list[Copied] = []
    loaded = load_model(
        ModelSource(path=str(folder), dtype=dtype), lambda _, copied: told.append(copied)
    )
    [copied] = told
    held = copied_bytes(loaded.model)
    experts = sum(p.nbytes for name, p in loaded.model.named_parameters() if ".experts." in name)
    assert copied.weights_bytes == held
    assert copied.merged_bytes == loaded.merged_bytes == experts > 0
    if dtype == "bfloat16":
        assert held == experts and copied.sources_bytes == 0
    else:
        assert held == resident_bytes(loaded.model) and copied.sources_bytes == experts


def test_pickled_weights_count_as_copies_before_they_are_loaded(model_folder: ModelFolder) -> None:
    folder = model_folder()
    model = load_model(ModelSource(path=str(folder))).model
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    told: list[Copied] = []
    load_model(ModelSource(path=str(folder)), lambda _, copied: told.append(copied))
    assert told == [Copied(weights_bytes=sum(p.nbytes for p in model.parameters()))]


def test_memory_that_goes_with_the_process_is_a_copy(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    start = model.weight.data_ptr()
    around = f"{start:x}-{start + model.weight.nbytes:x} rw-p 00000000 08:01 "
    maps = tmp_path / "maps"
    for line, expected in (
        ("7 /data/model.safetensors", model.bias.nbytes),
        ("7 /data/a name with blanks.safetensors", model.bias.nbytes),
        ("0 ", resident_bytes(model)),
        ("7 /memfd:arena (deleted)", resident_bytes(model)),
        ("7 /dev/shm/torch_1_2_3 (deleted)", resident_bytes(model)),
        ("7 /dev/shm/model.safetensors", model.bias.nbytes),  # stays there when nobody reads it
    ):
        maps.write_text(f"{around}{line}\n")
        assert copied_bytes(model, maps) == expected, line
    assert copied_bytes(model, tmp_path / "nothing") == resident_bytes(model)
