"""Loading models, sound and damaged ones, and a few words sampled from them."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import demo_config
from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.models.generation import sample_text
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.models.model_files import check_model_folder

Folder = Callable[..., Path]
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")


def _refusal(folder: Path | str, **settings: Any) -> str:
    with pytest.raises(BadInput) as caught:
        load_model(ModelSource(path=str(folder), **settings))
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return str(caught.value)


def _edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def _in_shards(folder: Path) -> list[Path]:
    """Save the model again in several shards with an index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40kB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    return shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_loads_in_its_own_dtype_with_its_own_weights(
    model_folder: Folder, family: str, dtype: torch.dtype
) -> None:
    folder = model_folder(family, dtype)
    loaded = load_model(ModelSource(path=str(folder)))
    assert loaded.precision.dtype == str(dtype).removeprefix("torch.")
    assert loaded.precision.dtype in loaded.precision.because
    assert loaded.name == folder.name
    assert loaded.model.training
    assert loaded.packs
    assert (loaded.embedding_rows, loaded.max_positions, loaded.pad_id) == (320, 128, 0)
    stored = load_file(folder / "model.safetensors")
    weights = loaded.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())


def test_shards_load_and_their_facts_are_known_before(model_folder: Folder) -> None:
    folder = model_folder("llama")
    whole = check_model_folder(folder)
    shards = _in_shards(folder)
    files = check_model_folder(folder)
    assert list(files.weights) == shards
    assert files.dtype == whole.dtype == "float32"
    assert files.parameters == whole.parameters
    assert files.weight_bytes == whole.weight_bytes == 4 * files.parameters
    loaded = load_model(ModelSource(path=str(folder)))
    assert sum(p.numel() for p in loaded.model.parameters()) == files.parameters


def test_fp16_becomes_bf16_with_the_reason_and_a_wish_is_followed(model_folder: Folder) -> None:
    folder = model_folder("llama", torch.float16)
    loaded = load_model(ModelSource(path=str(folder)))
    assert loaded.model.dtype == torch.bfloat16
    assert "fp16" in loaded.precision.because
    assert load_model(ModelSource(path=str(folder), dtype="float32")).model.dtype == torch.float32
    kept = load_model(ModelSource(path=str(folder), dtype="float16"))
    assert kept.model.dtype == torch.float16
    old_card = load_model(ModelSource(path=str(folder), capability=(7, 5)))
    assert old_card.model.dtype == torch.float16
    assert "not one of auto" in _refusal(folder, dtype="float8")
    assert "not one of" in _refusal(folder, dtype="int8")


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({}, ""),
        (
            {"model.norm.weight": torch.float64},
            "; 1 of its tensors, stored as float64, is converted",
        ),
        (
            {"model.norm.weight": torch.float64, "lm_head.weight": torch.float32},
            "; 2 of its tensors, stored as float32 and float64, are converted",
        ),
    ],
    ids=["none", "one", "two"],
)
def test_tensors_in_another_dtype_than_most_are_converted_and_told(
    model_folder: Folder, odd: dict[str, torch.dtype], told: str
) -> None:
    folder = model_folder("llama", torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.to(odd.get(name, tensor.dtype)) for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded = load_model(ModelSource(path=str(folder)))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.precision.because == f"the checkpoint is bfloat16{told}"
    config = demo_config(
        [f"model.path={folder}", "data.sequence_length=32", "placement.device=cpu"]
    )
    shown = next(c for c in preview(config).choices if c.name == "model.dtype")
    assert shown.because == loaded.precision.because


def test_a_missing_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in _refusal(tmp_path / "no")
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert "is a file" in _refusal(file)


def test_a_hub_id_that_cannot_be_fetched_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = _refusal("nobody/no-such-model")
    assert "no local folder" in message
    assert "name a local folder" in message


@pytest.mark.parametrize("error", [httpx.ReadTimeout("timed out"), httpx.InvalidURL("port 'x'")])
def test_a_hub_model_whose_download_breaks_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def breaks(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", breaks)
    assert "the hub cannot be reached" in _refusal("nobody/no-such-model")


@pytest.mark.parametrize(
    ("other", "complaint"),
    [("", "no config.json"), ("adapter_config.json", "adapter"), ("m.gguf", "GGUF")],
)
def test_a_folder_without_configuration_is_refused(
    model_folder: Folder, other: str, complaint: str
) -> None:
    folder = model_folder()
    (folder / "config.json").unlink()
    if other:
        (folder / other).write_text("{}")
    assert complaint in _refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_configuration_is_refused(model_folder: Folder, content: str) -> None:
    folder = model_folder()
    (folder / "config.json").write_text(content)
    assert "config.json" in _refusal(folder)


def test_a_folder_without_tokenizer_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in _refusal(folder)
    (folder / "tokenizer.json").write_text('{"damaged": true}')
    assert "tokenizer" in _refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_shard_is_refused_with_both_sizes(model_folder: Folder, keep: int) -> None:
    folder = model_folder()
    shard = _in_shards(folder)[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:keep])
    message = _refusal(folder)
    assert shard.name in message
    assert "cut off" in message
    assert f"{shard.stat().st_size:,} bytes" in message
    if keep == -1:
        assert f"{len(whole):,}" in message


def test_a_missing_shard_and_a_shard_of_another_model_are_refused(model_folder: Folder) -> None:
    folder = model_folder()
    first, second, *_ = _in_shards(folder)
    kept = second.read_bytes()
    second.unlink()
    message = _refusal(folder)
    assert "lacks 1 of" in message
    assert second.name in message
    shutil.copy(first, second)
    assert f"{second.name} lacks the tensor" in _refusal(folder)
    second.write_bytes(kept)
    load_model(ModelSource(path=str(folder)))


def test_an_index_that_leads_outside_the_folder_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    _in_shards(folder)
    _edit(folder / "model.safetensors.index.json", weight_map={"a": "../other.safetensors"})
    assert "not a file of this folder" in _refusal(folder)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (struct.pack("<Q", 2) + b"[]", "damaged"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "damaged"),
        (struct.pack("<Q", 1 << 60) + b"{}", "damaged"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(
    model_folder: Folder, content: bytes, complaint: str
) -> None:
    folder = model_folder()
    (folder / "model.safetensors").write_bytes(content)
    assert complaint in _refusal(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_count(
    model_folder: Folder, bad: float
) -> None:
    folder = model_folder()
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = weights[name][4, 6] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = _refusal(folder)
    assert name in message
    expected = "2 NaN and 0 infinite" if math.isnan(bad) else "0 NaN and 2 infinite"
    assert expected in message


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_models_own_is_refused_and_not_run(model_folder: Folder, file: str) -> None:
    folder = model_folder()
    ran = folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    _edit(folder / file, auto_map={"AutoModelForCausalLM": "own.Model"})
    message = _refusal(folder)
    assert file in message
    assert "model.trust_remote_code" in message
    assert not ran.exists()
    check_model_folder(folder, trust_remote_code=True)


def test_a_quantised_checkpoint_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    _edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised (gptq)" in _refusal(folder)
    _edit(folder / "config.json", quantization_config=None)
    weights = load_file(folder / "model.safetensors")
    integers = {name: tensor.to(torch.int8) for name, tensor in weights.items()}
    save_file(integers, folder / "model.safetensors", metadata={"format": "pt"})
    assert "stores its weights as I8" in _refusal(folder)


def test_weights_of_another_model_are_refused(model_folder: Folder) -> None:
    folder = model_folder("llama")
    _edit(folder / "config.json", num_hidden_layers=3)
    assert "does not hold the weights model.layers.2" in _refusal(folder)
    _edit(folder / "config.json", num_hidden_layers=2, intermediate_size=72)
    message = _refusal(folder)
    assert "another shape than config.json says model.layers.0.mlp" in message


def test_a_model_that_is_no_causal_language_model_is_refused(model_folder: Folder) -> None:
    folder = model_folder("llama")
    _edit(folder / "config.json", model_type="vit")
    assert "causal language model" in _refusal(folder)
    _edit(folder / "config.json", model_type="from-the-future")
    assert "causal language model" in _refusal(folder)


class _Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_pickled_tensors_load_and_a_pickle_with_code_is_refused_unrun(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    loaded = load_model(ModelSource(path=str(folder)))
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    ran = tmp_path / "ran"
    torch.save(weights | {"x": _Attack(ran)}, folder / "pytorch_model.bin")
    assert "convert it to safetensors" in _refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Attack(ran)))
    assert "convert it to safetensors" in _refusal(folder)
    assert not ran.exists()


def test_a_sample_starts_with_its_prompt_and_leaves_the_model_and_the_seed_alone(
    model_folder: Folder,
) -> None:
    loaded = load_model(ModelSource(path=str(model_folder())))
    before = torch.get_rng_state()
    prompt = "the quick"
    greedy = [sample_text(loaded.model, loaded.tokenizer, prompt, 12) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert loaded.model.training
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in greedy)
    assert greedy[0] == greedy[1]
