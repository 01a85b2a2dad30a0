"""Runs of lora and qlora are exported by the command, and what comes out is what was trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fluxtrain as engine
from fluxtrain.commands.pages import export_page
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import ExportAnswer
from fluxtrain.plan import states
from tests.engine.adapter_folders import exported
from tests.engine.test_lora_run import run, settings

MakeConfig = Callable[..., Path]
FAST = {"train__steps": 5, "train__learning_rate": 0.02}


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have small models."""
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "lora", "variant": "rslora"},
        {"name": "lora", "variant": "dora"},
        {"name": "qlora"},
        {"name": "qlora", "base": "int8", "variant": "dora"},
        {"name": "qlora", "base": "nf4", "targets": ["q_proj", "v_proj"]},
    ],
    ids=lambda given: "-".join(map(str, given.values())),
)
@pytest.mark.thinned(2)
def test_the_merged_model_computes_what_was_trained(
    given: dict[str, Any], run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", **FAST)
    run(config, tmp_path / "run", *settings(given))
    answer = exported(tmp_path / "run")
    assert answer.folder == str(tmp_path / "run" / "merged")
    assert answer.logits is not None and answer.logits.source.endswith("sentences.txt")
    assert answer.dtype == "bfloat16"
    storage = given.get("base", "nf4-double") if given["name"] == "qlora" else "plain"
    assert answer.onto == ("original" if storage == "plain" else f"dequantised ({storage})")
    merged = AutoModelForCausalLM.from_pretrained(answer.folder, dtype=torch.bfloat16).eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-float32", dtype=torch.bfloat16)
    trained: Any = PeftModel.from_pretrained(
        base, str(tmp_path / "run" / "model"), is_trainable=True, autocast_adapter_dtype=False
    ).eval()
    ids = torch.arange(24).reshape(2, 12) * 5 % 320
    with torch.no_grad():
        alone = AutoModelForCausalLM.from_pretrained(
            tmp_path / "llama-float32", dtype=torch.bfloat16
        )(ids).logits
        engine.wrap(trained, device="cpu", frozen=storage)
        expected = trained(ids).logits + 0
        found = merged(ids).logits
    engine.unwrap(trained)
    apart, changed = (float((expected - one).float().norm()) for one in (found, alone))
    assert apart < 0.1 * changed


@pytest.mark.slow
def test_a_demo_run_is_merged_though_its_base_is_on_no_disk(tmp_path: Path) -> None:
    from fluxtrain.config.schema import demo_config
    from fluxtrain.train.checkpoint.recovery import locate
    from fluxtrain.train.run import train

    overrides = ["train.steps=2", "train.batch_rows=2", "data.sequence_length=32",
                 "placement.device=cpu", "train.learning_rate=0.05"]  # fmt: skip
    config = demo_config([*overrides, "method.name=qlora", "method.rank=4"])
    train(config, locate(None, tmp_path / "run", config))
    answer = exported(tmp_path / "run")
    assert (answer.base, answer.onto) == ("demo", "dequantised (nf4-double)")
    assert AutoModelForCausalLM.from_pretrained(answer.folder) is not None
    with pytest.raises(BadInput, match="made of a run's seed: name the run"):
        (tmp_path / "run" / "model").rename(tmp_path / "alone")
        exported(tmp_path / "alone")


# -- adapters alone --------------------------------------------------------------------------------


def test_an_adapter_alone_is_read_by_peft_with_its_base(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    run(run_config(model__dtype="bf16", **FAST), tmp_path / "run", *settings({"name": "lora"}))
    answer = exported(tmp_path / "run", merge=False, to=tmp_path / "mine")
    assert (answer.kind, answer.dtype, answer.logits) == ("adapter", "bfloat16", None)
    model = AutoPeftModelForCausalLM.from_pretrained(answer.folder, dtype=torch.bfloat16)
    assert model.peft_config["default"].base_model_name_or_path == answer.base
    assert Path(answer.base).is_absolute()
    assert AutoTokenizer.from_pretrained(answer.folder).chat_template
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "mine", tmp_path / "run" / "model")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_adapter_in_another_dtype_is_checked(run_config: MakeConfig, tmp_path: Path) -> None:
    run(run_config(model__dtype="fp32", **FAST), tmp_path / "run", *settings({"name": "lora"}))
    answer = exported(tmp_path / "run", merge=False, dtype="fp16")
    tensors = load_file(Path(answer.folder, "adapter_model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert answer.logits is not None and 0 < answer.logits.mean_kl < answer.logits.kl_limit


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(
    run_config: MakeConfig, tmp_path: Path, fluxtrain: Callable[..., Any]
) -> None:
    config = run_config(**FAST)
    overrides = [part for one in settings({"name": "lora"}) for part in ("--set", one)]
    trained = fluxtrain("train", config, "--run-dir", tmp_path / "runs" / "r1", *overrides)
    assert trained.returncode == 0, trained.stderr
    told = fluxtrain("export", "last", "--merge", "--json")
    assert told.returncode == 0, told.stderr
    assert told.stderr == ""
    answer = msgspec.json.decode(told.stdout, type=ExportAnswer)
    assert answer.kind == "merged" and answer.logits is not None and answer.layers is not None
    assert answer.logits.line in export_page(answer) and answer.layers.line in export_page(answer)
    again = fluxtrain("export", "r1", "--merge")
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1 and "exists: remove it" in again.stderr
    alone = fluxtrain("export", "r1", "--to", tmp_path / "alone")
    assert alone.returncode == 0 and "in peft's format" in alone.stdout


def test_a_run_of_full_is_complete_already(run_config: MakeConfig, tmp_path: Path) -> None:
    run(run_config(train__steps=1), tmp_path / "run")
    with pytest.raises(BadInput, match="has trained all weights.* is the complete model"):
        exported(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(BadInput, match="has saved no model"):
        exported(tmp_path / "run")


def test_a_run_that_has_saved_nothing_is_told_to_go_on(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    run(run_config(train__steps=1), tmp_path / "run", *settings({"name": "lora"}))
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(BadInput, match="has saved no adapter .*go on with `fluxtrain train"):
        exported(tmp_path / "run")
