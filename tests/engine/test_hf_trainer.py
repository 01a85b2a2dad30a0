"""Hugging Face's Trainer and PEFT work on a wrapped model as on a plain one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import fluxtrain
from fluxtrain.models.export import save_model
from fluxtrain.models.loading import ModelSource, load_model
from tests.wrap_with import wrap_with

Make = Callable[..., Any]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTH, VOCABULARY = 10, 320

_LOAD_ELSEWHERE = """
import json, os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.arange(20).reshape(2, 10) * 7 % 320
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert not any(name.startswith("fluxtrain") for name in sys.modules)
    types = sorted({type(p).__name__ for p in model.parameters()})
    words = None
    if os.path.exists(folder + "/tokenizer.json"):
        words = AutoTokenizer.from_pretrained(folder)("the fox")["input_ids"]
    told = {"loss": loss, "dtype": str(model.dtype), "types": types, "words": words}
    print(json.dumps(told))
"""


class Rows(Dataset[dict[str, Tensor]]):
    """Random token rows, the same every time."""

    def __init__(self, rows: int = 24) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.fixture
def wrapped(new_model: Make) -> Iterator[Make]:
    made: list[nn.Module] = []

    def make(family: str, dtype: torch.dtype, **options: Any) -> Any:
        made.append(wrap_with(new_model(family, dtype), device="cpu", **options))
        return made[-1]

    yield make
    for model in made:
        fluxtrain.unwrap(model)


def trainer_of(model: Any, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2,
            "per_device_train_batch_size": 2, "max_grad_norm": 0.5, "warmup_steps": 1,
            "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 3,
            "weight_decay": 0.1, **options,
        },
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(6))


def losses_of(trainer: Trainer) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}


def norms_of(trainer: Trainer) -> dict[int, float]:
    return {e["step"]: e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: tied weights, dropout
@BOTH
@pytest.mark.thinned(4)
def test_a_resumed_run_equals_the_one_that_was_never_stopped(
    wrapped: Make, tmp_path: Path, dtype: torch.dtype, family: str, accumulation: int
) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    whole = trainer_of(wrapped(family, dtype), tmp_path, **options)
    whole.train()
    torch.manual_seed(99)  # a new process would have another state
    second = trainer_of(wrapped(family, dtype), tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected, got = losses_of(whole), losses_of(second)
    assert got == expected and sorted(got) == [1, 2, 3, 4]
    assert norms_of(second) == norms_of(whole)
    for name, weight in weights_of(whole.model).items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    optimizers = [t.optimizer.state_dict()["state"]["fluxtrain"] for t in (whole, second)]
    for index, entry in optimizers[0].items():
        for key in entry.keys() - {"step", "weights", "among"}:
            assert torch.equal(entry[key], optimizers[1][index][key])
        assert entry["step"] == optimizers[1][index]["step"] == 4


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fp32_training_equals_the_plain_trainers(
    wrapped: Make, new_model: Make, tmp_path: Path, accumulation: int
) -> None:
    results = []
    for model in (new_model("llama", torch.float32), wrapped("llama", torch.float32)):
        trainer = trainer_of(
            model, tmp_path, save_strategy="no", gradient_accumulation_steps=accumulation,
            learning_rate=1e-3, adam_epsilon=1e-5,
        )  # fmt: skip
        trainer.train()
        results.append((losses_of(trainer), norms_of(trainer), trainer.evaluate()["eval_loss"]))
    (losses, norms, loss), (our_losses, our_norms, our_loss) = results
    assert our_losses == pytest.approx(losses, rel=1e-4)
    assert our_norms == pytest.approx(norms, rel=1e-4)
    assert our_loss == pytest.approx(loss, rel=1e-4)


def test_evaluation_during_training_and_prediction_after_it(
    wrapped: Make, new_model: Make, tmp_path: Path
) -> None:
    model = wrapped("llama", torch.float32)
    trainer = trainer_of(
        model, tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )
    trainer.train()
    evaluations = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert len(evaluations) == 2
    plain = new_model("llama", torch.float32)
    plain.load_state_dict(weights_of(model))
    predicted = trainer.predict(Rows(6))
    with torch.no_grad():
        logits = plain(input_ids=Rows(6).ids).logits
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), logits)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluations), rel=1e-6)


def test_a_saved_model_loads_without_fluxtrain_and_gives_the_same_loss(
    model_folder: Make, tmp_path: Path
) -> None:
    """From a Trainer and from a run; one process loads all, as imports take seconds."""
    expected, saved = [], []
    for dtype in (torch.float32, torch.bfloat16):
        folder = model_folder("qwen2", dtype)  # tied embeddings
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        fluxtrain.wrap(model, device="cpu")
        saved.append(tmp_path / f"saved-{dtype}")
        trainer = trainer_of(model, tmp_path / f"run-{dtype}", save_strategy="no")
        trainer.train()
        trainer.save_model(str(saved[-1]))
        stored = load_file(saved[-1] / "model.safetensors")
        assert {t.dtype for t in stored.values()} == {dtype}
        ids = torch.arange(20).reshape(2, 10) * 7 % 320
        with torch.no_grad():
            loss = model.eval()(input_ids=ids, labels=ids).loss.item()
        made = {"loss": loss, "dtype": str(dtype), "types": ["Parameter"], "words": None}
        expected.append(made)
    loaded = load_model(ModelSource(path=str(model_folder("llama", torch.bfloat16))))
    saved.append(tmp_path / "saved-run")
    save_model(loaded.model, loaded.tokenizer, saved[-1])
    with torch.no_grad():
        loss = loaded.model.eval()(input_ids=ids, labels=ids).loss.item()
    expected.append({**made, "loss": loss, "words": loaded.tokenizer("the fox")["input_ids"]})
    run = subprocess.run(
        [sys.executable, "-c", _LOAD_ELSEWHERE, *map(str, saved)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert [json.loads(line) for line in run.stdout.splitlines()] == expected


def test_mixed_precision_and_gradient_checkpointing_follow_the_plain_trainer(
    wrapped: Make, new_model: Make, tmp_path: Path
) -> None:
    results = []
    for model in (new_model("llama", torch.float32), wrapped("llama", torch.float32)):
        trainer = trainer_of(
            model, tmp_path, save_strategy="no", bf16=True, gradient_checkpointing=True,
            learning_rate=1e-3,
        )  # fmt: skip
        trainer.train()
        results.append(losses_of(trainer))
    assert results[1] == pytest.approx(results[0], rel=2e-3)


# -- PEFT ------------------------------------------------------------------------------------------


def lora(model: Any, adapter_dtype: torch.dtype, *, dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    adapted = get_peft_model(model, config, autocast_adapter_dtype=adapter_dtype == torch.float32)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # zero would leave lora_A without a gradient
    return adapted


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters_are_trained_saved_and_loaded_alone(
    new_model: Make, tmp_path: Path, adapters: torch.dtype
) -> None:
    from peft import PeftModel

    model = fluxtrain.wrap(
        lora(new_model("llama", torch.bfloat16), adapters, dropout=0.1), device="cpu"
    )
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    trainer = trainer_of(model, tmp_path / "run", max_steps=6)
    trainer.train()
    assert losses_of(trainer)[6] != losses_of(trainer)[1]
    for name, parameter in model.named_parameters():
        assert ("lora_" in name) == parameter.requires_grad
        if "lora_" not in name:
            assert torch.equal(parameter, base[name])
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        new_model("llama", torch.bfloat16),
        tmp_path / "adapter",
        autocast_adapter_dtype=adapters == torch.float32,
    )
    ids = Rows().ids[:2]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
        with model.disable_adapter():
            plain = new_model("llama", torch.bfloat16)(ids).logits
            assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_on_a_wrapped_model_train_as_the_plain_trainers(
    new_model: Make, tmp_path: Path, dropout: float
) -> None:
    results = []
    for wraps in (False, True):
        model = lora(new_model("llama", torch.float32), torch.float32, dropout=dropout)
        if wraps:
            fluxtrain.wrap(model, device="cpu", offload="weights")
        trainer = trainer_of(model, tmp_path, save_strategy="no", learning_rate=1e-3)
        trainer.train()
        results.append((losses_of(trainer), norms_of(trainer), trainer.evaluate()["eval_loss"]))
    (losses, norms, loss), (our_losses, our_norms, our_loss) = results
    assert our_losses == pytest.approx(losses, rel=1e-4)
    assert our_norms == pytest.approx(norms, rel=1e-3)
    assert our_loss == pytest.approx(loss, rel=1e-4)
