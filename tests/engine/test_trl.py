"""TRL's SFTTrainer trains wrapped models, with adapters and without, as it does plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import fluxtrain
from fluxtrain.plan import states
from tests.engine.adapter_folders import exported
from tests.engine.conftest import SENTENCES

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

Make = Callable[..., Any]
Told = list[tuple[float, float]]


@pytest.fixture
def trained(new_model: Make, tokenizer_folder: Path, tmp_path: Path) -> Callable[..., Told]:
    """Train a tiny model; return loss and norm of each step."""

    def train(
        how: str, dtype: torch.dtype = torch.float32, save: Path | None = None, **options: Any
    ) -> Told:
        torch.manual_seed(0)
        model = new_model("llama", dtype)
        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
            modules_to_save=["lm_head"] if options.pop("head", False) else None,
        )  # fmt: skip
        given = None
        if how == "adapters, then wrapped":
            model = fluxtrain.wrap(get_peft_model(model, config), device="cpu", **options)
        elif how == "wrapped, then peft_config":
            model, given = fluxtrain.wrap(model, device="cpu", **options), config
        elif how == "adapters":
            model = get_peft_model(model, config)
        elif how == "peft_config":
            given = config
        elif how == "wrapped":
            model = fluxtrain.wrap(model, device="cpu", **options)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenizer.pad_token = tokenizer.eos_token
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(
                output_dir=str(tmp_path / "trl"), max_steps=4, logging_steps=1, learning_rate=1e-2,
                per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
                seed=3, save_strategy="no", bf16=False, max_length=32,
            ),
            train_dataset=datasets.Dataset.from_list([{"text": s} for s in SENTENCES[:24]]),
            processing_class=tokenizer,
            peft_config=given,
        )  # fmt: skip
        trainer.train()
        if save is not None:
            trainer.save_model(str(save))
        return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]

    return train


def equal(found: Told, expected: Told, tolerance: float = 1e-4) -> None:
    assert len(found) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    assert found[-1][0] < found[0][0]


@pytest.mark.parametrize("head", [False, True], ids=["adapters", "and a saved head"])
def test_adapters_on_a_wrapped_model_train_as_on_a_plain_one(
    head: bool, trained: Callable[..., Told]
) -> None:
    expected = trained("adapters", head=head)
    equal(trained("adapters, then wrapped", head=head, offload="weights"), expected)


def test_a_peft_config_for_a_wrapped_model(trained: Callable[..., Told]) -> None:
    equal(trained("wrapped, then peft_config"), trained("peft_config"))


def test_a_packed_base_trains_and_its_adapter_is_exported(
    trained: Callable[..., Told], model_folder: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    plain = trained("adapters", torch.bfloat16)
    packed = trained(
        "adapters, then wrapped", torch.bfloat16, frozen="nf4", save=tmp_path / "adapter"
    )
    equal(packed, plain, 0.2)
    assert packed != plain
    base = model_folder("llama", torch.bfloat16)
    answer = exported(tmp_path / "adapter", base=str(base), packed="nf4")
    assert answer.onto == "dequantised (nf4)" and answer.logits is not None
