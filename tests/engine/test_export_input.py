"""What cannot be exported is said in one sentence, with code 2, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fluxtrain.errors import BadInput
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.results.adapter.chosen_base import ExportRequest, base_name_of
from fluxtrain.results.adapter.source import read_adapter
from tests.engine.adapter_folders import exported, make_adapter

Folder = Callable[..., Path]


@pytest.fixture
def base(model_folder: Folder) -> Path:
    return model_folder("llama")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return make_adapter(base, tmp_path / "adapter")


def edited(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(named: Path | str, says: str, tmp_path: Path, **settings: Any) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput, match=says) as error:
        exported(named, **settings)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_base_that_is_not_there(adapter: Path, base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    base.rename(moved)
    refused(adapter, "does not exist.*name its folder with --base", tmp_path)
    assert exported(adapter, base=str(moved)).base == str(moved)


def test_a_base_that_nothing_names(adapter: Path, tmp_path: Path) -> None:
    edited(adapter, base_model_name_or_path=None)
    refused(adapter, "does not say which base it is for: name it with --base", tmp_path)


def test_a_base_of_other_sizes(adapter: Path, base: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    shutil.copytree(base, wide)
    config = AutoModelForCausalLM.from_pretrained(base).config
    config.intermediate_size = 96
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    says = r"not fit its base: .*size mismatch for \S*mlp\S* .*\[.*96.*\].*--base"
    refused(adapter, says, tmp_path, base=str(wide))


def test_a_base_of_another_family(adapter: Path, model_folder: Folder, tmp_path: Path) -> None:
    other = model_folder("gpt2")
    refused(adapter, "not fit its base: .*[Tt]arget modules", tmp_path, base=str(other))


def test_a_base_with_the_same_shapes_and_other_weights(
    run_config: Callable[..., Path], tmp_path: Path
) -> None:
    """The key of the weight files, which a run keeps with its adapter, tells them apart."""
    from tests.engine.runs import run
    from tests.engine.test_lora_run import settings

    config = run_config(train__steps=2)
    run(config, tmp_path / "run", *settings({"name": "lora"}))
    base = tmp_path / "llama-float32"
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "run", "not the base that .* trained on.*--other-base", tmp_path)
    assert exported(tmp_path / "run", other_base=True, dtype="fp32").kind == "merged"


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_a_quantised_base(method: str, adapter: Path, base: Path, tmp_path: Path) -> None:
    path = base / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    says = rf"base .* is quantised \({method}\), .*: name the original.*--base.*--packed"
    refused(adapter, says, tmp_path)


def test_a_folder_without_an_adapter(base: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, r"holds no adapter \(adapter_config.json\) and is no run", tmp_path)
    refused(base, "holds a complete model and no adapter", tmp_path)
    refused("no-such-run", "no run 'no-such-run'", tmp_path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "adapter_model.safetensors").unlink(), "lacks adapter_model.safetensors"),
        (
            lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
            "is a pickle, which could run any code",
        ),
        (
            lambda f: (f / "adapter_model.safetensors").write_bytes(
                (f / "adapter_model.safetensors").read_bytes()[:-100]
            ),
            "is cut off",
        ),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 500), "cut off|damaged"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read by peft"),
        (lambda f: edited(f, peft_type="NEW"), "cannot be read by peft"),
    ],
    ids=["no weights", "pickle", "cut off", "noise", "no json", "unknown type"],
)
def test_damaged_adapters(
    damage: Callable[[Path], Any], says: str, adapter: Path, tmp_path: Path
) -> None:
    damage(adapter)
    refused(adapter, says, tmp_path)


def test_an_adapter_that_is_not_finite_or_not_whole(adapter: Path, tmp_path: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * torch.inf}, path)
    refused(adapter, f"{name} holds NaN or infinity", tmp_path)
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    refused(adapter, f"lacks {name}, which its configuration asks for", tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "int8"}, "--dtype is 'int8': use one of auto, bf16"),
        ({"onto": "else"}, "--onto is 'else': use one of dequantised, original"),
        ({"packed": "nf3"}, "--packed is 'nf3': use one of nf4"),
        ({"rows": 0}, "--rows is 0: compare 1 to 64"),
        ({"device": "tpu"}, "--device is 'tpu': use one of cpu, cuda"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_values_that_are_not_known(
    settings: dict[str, Any], says: str, adapter: Path, tmp_path: Path
) -> None:
    refused(adapter, says, tmp_path, **settings)


def test_a_pickled_base(adapter: Path, base: Path, tmp_path: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    torch.save(tensors, base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    refused(adapter, "is a pickle, which is not read tensor by tensor", tmp_path)


def test_an_adapter_beside_a_model_is_never_loaded_with_it(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(adapter / name, base / name)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    assert loaded.state_dict().keys() != plain.keys(), "transformers would load the adapter too"
    with pytest.raises(BadInput, match="holds a model and an adapter of .* move .* away"):
        load_model(ModelSource(path=str(base)))
    refused(adapter, "holds a model and an adapter", tmp_path)


def test_a_base_is_named_without_detours(base: Path, adapter: Path) -> None:
    request = ExportRequest(named=str(adapter), base=str(base / ".." / base.name))
    assert base_name_of(request, read_adapter(adapter)) == str(base.resolve())
