"""Runs of lora and qlora are exported by the command, and what comes out is what was trained."""

from __future__ import annotations

import json
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
from fluxtrain.events.events import EvaluationFinished
from fluxtrain.plan import states
from fluxtrain.results.evaluate_model import EvaluationRequest, evaluate_model
from fluxtrain.results.model_request import ModelRequest
from tests.engine.adapter_folders import exported
from tests.engine.runs import run
from tests.engine.test_lora_run import settings

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
@pytest.mark.thinned(1)
def test_the_merged_model_computes_what_was_trained(
    given: dict[str, Any], run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", **FAST)
    run(config, tmp_path / "run", *settings(given))
    answer = exported(tmp_path / "run")
    assert answer.folder == str(tmp_path / "run" / "merged")
    assert answer.logits is not None and answer.logits.source.endswith("sentences.txt")
    assert answer.dtype == "bfloat16"
    storage: Any = given.get("base", "nf4-double") if given["name"] == "qlora" else "plain"
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


def test_a_saved_model_is_complete_already(run_config: MakeConfig, tmp_path: Path) -> None:
    run(run_config(train__steps=1), tmp_path / "run")
    with pytest.raises(BadInput, match="ready for use as it is; --step N"):
        exported(tmp_path / "run")


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Conversations whose end token is none of the model's own."""
    said = {"user": "and two?", "assistant": "it is four"}
    talk = {"messages": [{"role": role, "content": words} for role, words in said.items()]}
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps(talk) + "\n") * 60)
    return path


@pytest.mark.parametrize(
    "given",
    [{"name": "full"}, {"name": "lora", "targets": ["q_proj", "lm_head"]}, {"name": "qlora"}],
    ids=lambda given: given["name"],
)
@pytest.mark.thinned(1)
def test_a_stopped_run_is_used_from_its_checkpoint_as_if_it_had_ended_there(
    given: dict[str, Any], run_config: MakeConfig, tmp_path: Path, talks: Path
) -> None:
    config = run_config(
        model__dtype="bf16", data__path=str(talks), train__checkpoint_every=3, **FAST
    )
    method = [f"method.name={given['name']}"] if given["name"] == "full" else settings(given)
    events = run(config, tmp_path / "run", *method)
    ended = tmp_path / "ended"
    (tmp_path / "run" / "model").rename(ended)
    answer = exported(tmp_path / "run", merge=False)
    assert answer.folder == str(tmp_path / "run" / f"{answer.kind}-step-5")
    assert answer.kind == ("model" if given["name"] == "full" else "adapter")
    assert "not checked" not in export_page(answer)  # a copy, bit for bit
    for path in ended.iterdir():
        made = Path(answer.folder, path.name)
        if path.name == "adapter_config.json":
            one, two = (json.loads(each.read_text()) for each in (path, made))
            assert set(one.pop("target_modules")) == set(two.pop("target_modules"))
            assert one == two
        elif path.suffix == ".safetensors":
            tensors, again = load_file(path), load_file(made)
            assert tensors.keys() == again.keys()
            assert all(torch.equal(tensors[name], again[name]) for name in tensors)
        else:
            assert path.read_bytes() == made.read_bytes(), path.name
    loss = [event.loss for event in events if isinstance(event, EvaluationFinished)][-1]
    request = ModelRequest(named=str(tmp_path / "run"), device="cpu")
    found = evaluate_model(EvaluationRequest(model=request), lambda _: None)
    assert (found.model, found.loss) == ("run at step 5", pytest.approx(loss, rel=1e-6))
    merges = given["name"] != "full"
    earlier = exported(tmp_path / "run", merge=merges, step=3)
    assert AutoModelForCausalLM.from_pretrained(earlier.folder) is not None
    for step, words in ((2, r"no checkpoint of step 2 \(it has 3, 5\)"), (3, "exists: remove")):
        with pytest.raises(BadInput, match=words):
            exported(tmp_path / "run", merge=merges, step=step)


def test_a_checkpoint_is_used_with_no_other_base_than_its_own(
    run_config: MakeConfig, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    run(run_config(train__checkpoint_every=1, train__steps=1), tmp_path / "run")
    other = model_folder("qwen2")
    with pytest.raises(BadInput, match=r"is not the model that .*name the right one with --base"):
        exported(tmp_path / "run", merge=False, step=1, base=str(other))
    with pytest.raises(BadInput, match="--merge is of adapters"):
        exported(tmp_path / "run", step=1)
    with pytest.raises(BadInput, match="--step is of a run's checkpoints"):
        exported(other, step=1)
    (tmp_path / "llama-float32").rename(tmp_path / "moved")
    with pytest.raises(BadInput, match="does not exist.*name its folder with --base"):
        exported(tmp_path / "run", merge=False, step=1)
    exported(tmp_path / "run", merge=False, step=1, base=str(tmp_path / "moved"))


def test_a_run_that_has_saved_nothing_is_told_to_run(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    run(run_config(train__steps=1), tmp_path / "run", *settings({"name": "lora"}))
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(BadInput, match="no model and no checkpoint .*`fluxtrain train --resume"):
        exported(tmp_path / "run")
