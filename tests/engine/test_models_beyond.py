"""Folders whose files hold more than their config.json describes, codes where weights belong, or
headers that describe other bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluxtrain.errors import BadInput
from fluxtrain.models.loading import ModelSource, further_blocks, load_model
from fluxtrain.models.model_files import check_model_folder

Folder = Callable[..., Path]


def _save(folder: Path, **more: Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


def _refusal(folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load_model(ModelSource(path=str(folder)))
    return str(caught.value)


def test_a_model_with_fewer_blocks_than_are_stored_is_refused(model_folder: Folder) -> None:
    folder = model_folder("llama")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    message = _refusal(folder)
    assert f"model.layers.{config['num_hidden_layers']}." in message
    assert "fewer blocks" in message
    assert "config.json" in message


def test_a_block_that_predicts_further_tokens_is_left_out_on_purpose() -> None:
    """DeepSeek-V3 and GLM store it under the number behind their last block."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert further_blocks(model, ["layers.2.weight"]) == ["layers.2.weight"]
    predicts = ["layers.2.weight", "layers.2.bias", "layers.2.eh_proj.weight"]
    assert further_blocks(model, predicts) == []
    assert further_blocks(model, [*predicts, "layers.3.bias"]) == ["layers.3.bias"]


def test_a_weight_stored_as_an_integer_is_refused(model_folder: Folder) -> None:
    folder = model_folder("llama")
    _save(folder, **{"lm_head.weight": torch.ones(320, 32, dtype=torch.int8)})
    message = _refusal(folder)
    assert "1 of its weights as I8" in message
    assert "unquantised" in message


def test_integers_that_are_no_weights_are_read(model_folder: Folder) -> None:
    folder = model_folder("llama")
    _save(folder, position_ids=torch.arange(4))
    assert load_model(ModelSource(path=str(folder))).packs


@pytest.mark.parametrize("shape", [[2**40, 2**30], [3], [-1, -4], []], ids=str)
def test_a_header_whose_shapes_are_not_those_of_its_bytes_is_refused_before_loading(
    model_folder: Folder, shape: list[int]
) -> None:
    path = model_folder() / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tensor = next(name for name in header if name != "__metadata__")
    header[tensor]["shape"] = shape
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(BadInput, match="header is damaged: download it again"):
        check_model_folder(path.parent)
