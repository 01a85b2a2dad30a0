"""Runs of the methods lora and qlora: what they train, keep, resume and save."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.core.quantization.packing import pack
from fluxtrain.errors import BadInput, Interrupted
from fluxtrain.events import events as ev
from fluxtrain.plan import states
from fluxtrain.train.loop import TrainingLoop
from tests.engine.runs import MakeConfig, losses, run

METHODS: list[dict[str, Any]] = [
    {"name": "lora"},
    {"name": "lora", "variant": "rslora", "dropout": 0.1},
    {"name": "lora", "variant": "dora"},
    {"name": "qlora"},
    {"name": "qlora", "base": "int8", "targets": ["q_proj", "v_proj"]},
]


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have small models."""
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)


def settings(given: dict[str, Any]) -> list[str]:
    return [f"method.{name}={json.dumps(value)}" for name, value in {"rank": 4, **given}.items()]


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    step = TrainingLoop._step  # type: ignore[attr-defined]
    done = 0

    def counted(loop: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done == steps:
            raise Interrupted("the test stops it")
        done += 1
        return step(loop, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_step", counted)
        yield


@pytest.mark.parametrize("given", METHODS, ids=lambda given: "-".join(map(str, given.values())))
@pytest.mark.thinned(2)
def test_a_run_trains_adapters_alone_and_saves_them_in_pefts_format(
    given: dict[str, Any], run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", train__steps=5, train__learning_rate=0.01)
    events = run(config, tmp_path / "run", *settings(given))
    found = losses(events)
    assert found[-1] < found[0]
    hello = [event for event in events if isinstance(event, ev.Hello)][-1]
    assert hello.method == given["name"]
    assert 0 < hello.trained_parameters < hello.parameters / 4
    packs = given["name"] == "qlora"
    assert hello.rank == 4
    assert hello.storage == (given.get("base", "nf4-double") if packs else "plain")
    place = [event for event in events if isinstance(event, ev.ResidencySampled)][-1]
    frozen, packed = place.frozen_bytes, place.packed_bytes
    assert (packed > 0) == packs and 0 < frozen + packed < place.weights_bytes
    assert sum(one.count * one.packed_bytes for one in place.blocks) == packed
    used = [event for event in events if isinstance(event, ev.MemorySampled)][-1]
    assert sum(used.device_by.values()) == used.device_used_bytes
    assert all(size >= 0 for size in used.device_by.values())
    assert (used.device_by["packed"] > 0) == packs == (used.device_by["unpacked"] > 0)
    moved = [event for event in events if isinstance(event, ev.TrafficSampled)][-1]
    assert (moved.h2d_packed_bytes > 0) == packs
    assert 0 < moved.h2d_frozen_bytes + moved.h2d_packed_bytes < moved.h2d_bytes
    model = tmp_path / "run" / "model"
    tensors = load_file(model / "adapter_model.safetensors")
    assert tensors and all("lora_" in name for name in tensors)
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
    made = json.loads((model / "adapter_config.json").read_text())
    base = load_config(config).model.path
    assert (made["base_model_name_or_path"], made["r"], made["lora_alpha"]) == (base, 4, 8)
    assert (model / "chat_template.jinja").exists() and (model / "tokenizer.json").exists()


def test_the_trained_end_of_an_adapter_run_is_told_and_kept_beside_the_adapter(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    said = {"user": "and two?", "assistant": "it is four"}
    talk = {"messages": [{"role": role, "content": words} for role, words in said.items()]}
    data = tmp_path / "talks.jsonl"
    data.write_text((json.dumps(talk) + "\n") * 40)
    config = run_config(data__path=str(data), data__held_out=0.0, train__steps=2)
    events = run(config, tmp_path / "run", *settings({"name": "lora"}))
    [warning] = [e.text for e in events if isinstance(e, ev.LogWritten) and "answers end" in e.text]
    assert "pass eos_token_id=[2, 0] to generate" in warning
    model = tmp_path / "run" / "model"
    kept = GenerationConfig.from_pretrained(model)
    assert kept.eos_token_id == [2, 0]
    base = AutoModelForCausalLM.from_pretrained(load_config(config).model.path)
    adapted = PeftModel.from_pretrained(base, model)

    def always(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill(-1, torch.tensor([2]), 0.0)  # <|im_end|>

    asked = {"input_ids": torch.tensor([[5, 6]]), "logits_processor": [always], "max_new_tokens": 8}
    for options, made in (({}, 8), ({"eos_token_id": [2, 0]}, 1), ({"generation_config": kept}, 1)):
        found = adapted.generate(**asked, **options)
        assert found.shape[1] - 2 == made


def test_the_saved_adapter_gives_pefts_own_model_the_trained_loss(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="fp32", train__steps=5, train__learning_rate=0.01)
    events = run(config, tmp_path / "run", *settings({"name": "lora"}))
    evaluated = [e.loss for e in events if isinstance(e, ev.EvaluationFinished)][-1]
    base = AutoModelForCausalLM.from_pretrained(load_config(config).model.path)
    ids = torch.randint(0, 90, (2, 16))
    with torch.no_grad():
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "run" / "model"))
        after = adapted(input_ids=ids).logits
    assert evaluated < losses(events)[0]
    assert not torch.allclose(before, after, atol=1e-3)


@pytest.mark.parametrize("given", METHODS, ids=lambda given: "-".join(map(str, given.values())))
@pytest.mark.thinned(1)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(
    given: dict[str, Any], run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(model__dtype="bf16", train__steps=6, train__checkpoint_every=2)
    whole = run(config, tmp_path / "whole", *settings(given))
    stopping = interrupted_after(4, monkeypatch)
    next(stopping)
    with pytest.raises(Interrupted):
        run(config, tmp_path / "parts", *settings(given))
    with pytest.raises(StopIteration):
        next(stopping)
    parts = run(config, tmp_path / "parts", *settings(given), resume=str(tmp_path / "parts"))
    assert losses(parts)[-2:] == losses(whole)[-2:]
    one, other = (
        load_file(tmp_path / name / "model" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_trained_weights_alone(run_config: MakeConfig, tmp_path: Path) -> None:
    config = run_config(model__dtype="bf16", train__steps=2, train__checkpoint_every=2)
    run(config, tmp_path / "run", *settings({"name": "qlora"}))
    folder = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    names: list[str] = []
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            names += list(file.keys())
    assert names and all(".lora_" in name for name in names)


def scale_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj" in name)
    save_file(tensors | {name: tensors[name] * 1.5}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (scale_a_weight, "model.weights was"),
        (lambda folder: None, "method.alpha was 8 and is 5"),
    ],
)
def test_adapters_do_not_go_on_beside_other_weights_or_settings(
    change: Callable[[Path], None], says: str, run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", train__steps=4, train__checkpoint_every=2)
    first = settings({"name": "lora", "alpha": 8})
    run(config, tmp_path / "run", *first, "train.steps=2")
    change(Path(load_config(config).model.path))
    other = first if "weights" in says else settings({"name": "lora", "alpha": 5})
    with pytest.raises(BadInput, match=says):
        run(config, tmp_path / "run", *other, resume=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"targets": ["q_prj"]}, "no linear layer of .* is called 'q_prj': use q_proj"),
        ({"rank": 33}, "method.rank is 33 and .* an adapter of rank .* can express"),
        ({"rank": 0}, "method.rank"),
        ({"dropout": 1.0}, "method.dropout"),
        ({"base": "nf3"}, "method.base"),
        ({"targets": []}, "method.targets"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_loaded(
    given: dict[str, Any], says: str, run_config: MakeConfig
) -> None:
    with pytest.raises(BadInput, match=says):
        preview(load_config(run_config(), settings({"name": "lora", **given})))


def test_a_second_start_reads_the_packed_weights_of_the_first(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = run_config(model__dtype="bf16", train__steps=3)
    given = settings({"name": "qlora"})
    first = losses(run(config, tmp_path / "first", *given))
    kept = next((tmp_path / "cache" / "fluxtrain" / "packed").glob("*/*.packed"))
    packs = 0

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal packs
        packs += 1
        pack(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("fluxtrain.core.memory.packed.pack", counted)
        assert losses(run(config, tmp_path / "second", *given)) == first
        timing = packs  # a block that was timed is packed from its copies
        kept.write_bytes(b"damaged" + kept.read_bytes()[7:])
        assert losses(run(config, tmp_path / "third", *given)) == first
    assert packs > timing


def test_a_weight_that_is_not_finite_is_refused_while_it_is_packed(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", train__steps=1)
    path = Path(load_config(config).model.path) / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "up_proj" in name)
    broken = tensors[name].clone()
    broken[0, 0] = torch.inf
    save_file(tensors | {name: broken}, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match="up_proj.* holds 1 values of .* NaN or infinite"):
        run(config, tmp_path / "run", *settings({"name": "qlora"}))
