"""An adapter's configuration that disagrees with its tensors, or that peft cannot carry out, is
refused with code 2, naming the value, before anything is made by it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.exporting import attached
from fluxtrain.exporting.check import logits
from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.used_models import opened

NAN, INFINITY = float("nan"), float("inf")
RANK = "a rank is a whole number, 1 or more"
MISSED = r"and base_model\S+ in the file of its weights has rank 4"
NAMES = "it is a list of names of layers"


@pytest.fixture
def adapter(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    return make_adapter(model_folder("llama"), tmp_path / "adapter")


def edited(adapter: Path, **changes: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def refusals(adapter: Path) -> list[str]:
    """What opening the adapter and exporting it say."""
    with pytest.raises(BadInput) as at_export:
        exported(adapter)
    with pytest.raises(BadInput) as at_opening, opened(adapter):
        pass
    assert at_export.value.exit_code == at_opening.value.exit_code == EXIT_BAD_INPUT
    return [str(at_export.value), str(at_opening.value)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"r": 4_000_000_000}, f"r is 4,000,000,000, {MISSED}"),
        ({"r": 10**30}, f"r is {10**30}, {MISSED}"),
        ({"r": 8}, f"r is 8, {MISSED}"),
        ({"r": -4}, f"r is -4, and {RANK}"),
        ({"r": 0}, f"r is 0, and {RANK}"),
        ({"r": "4"}, f"r is '4', and {RANK}"),
        ({"r": 4.0}, f"r is 4.0, and {RANK}"),
        ({"r": True}, f"r is True, and {RANK}"),
        ({"r": None}, f"r is None, and {RANK}"),
        ({"lora_alpha": NAN}, "lora_alpha is nan, and it is a number"),
        ({"lora_alpha": INFINITY}, "lora_alpha is inf, and it is a number"),
        ({"lora_alpha": 10**400}, r"lora_alpha is 10{100}0*\.\.\.0+, and it is a number"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x', and it is a number"),
        ({"lora_dropout": NAN}, "lora_dropout is nan, and it is a share"),
        ({"rank_pattern": {"q_proj": 4_000_000_000}},
         rf"rank_pattern\['q_proj'\] is 4,000,000,000, {MISSED}"),
        ({"rank_pattern": {"q_proj": "x"}}, rf"rank_pattern\['q_proj'\] is 'x', and {RANK}"),
        ({"rank_pattern": {"nowhere": 4_000_000_000}}, "no tensor of its weights is larger than"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\], and it is a mapping of layers"),
        ({"rank_pattern": None}, "rank_pattern is None, and it is a mapping of layers"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern is '\(', and it is no regular expression"),
        ({"alpha_pattern": {"q_proj": NAN}}, r"alpha_pattern\['q_proj'\] is nan, and it is a numb"),
        ({"target_modules": 3}, f"target_modules is 3, and {NAMES}"),
        ({"target_modules": [3]}, rf"target_modules is \{{3\}}, and {NAMES}"),
        ({"target_modules": "("}, r"target_modules is '\(', and it is no regular expression"),
        ({"exclude_modules": 3}, f"exclude_modules is 3, and {NAMES}"),
        ({"modules_to_save": 3}, f"modules_to_save is 3, and {NAMES}"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3, and it is the name of"),
    ],
)  # fmt: skip
def test_a_value_that_no_adapter_has_is_named_before_anything_is_made(
    changes: dict[str, Any], says: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("peft makes tensors by this configuration")

    monkeypatch.setattr(attached, "get_peft_model", made)
    monkeypatch.setattr(logits.PeftModel, "from_pretrained", made)
    path = edited(adapter, **changes)
    exporting, opening = refusals(adapter)
    assert exporting == opening
    assert exporting.startswith(f"{path}: ")
    assert re.search(says, exporting)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias": "x"}, "Requested bias: x, is not implemented"),
        ({"bias": 3}, "AttributeError"),
        ({"init_lora_weights": 3}, "AttributeError"),
        ({"megatron_config": {"a": 1}}, "No module named 'megatron'"),
        ({"target_modules": ["nowhere"]}, "'nowhere'} not found in the base model"),
    ],
)
def test_what_peft_cannot_carry_out_is_no_bug(
    changes: dict[str, Any], says: str, adapter: Path
) -> None:
    edited(adapter, **changes)
    for told in refusals(adapter):
        assert says in told and "--base" in told


def test_what_peft_cannot_merge_is_no_bug(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    biased = make_adapter(model_folder("llama"), tmp_path / "biased", lora_bias=True)
    with pytest.raises(BadInput, match="cannot be merged: Impossible to merge LoRA with `lora_b"):
        exported(biased)


def test_memory_that_runs_out_is_not_told_as_the_adapters_fault(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(logits.PeftModel, "from_pretrained", full)
    with pytest.raises(MemoryError), opened(adapter):
        pass


def test_ranks_of_their_own_are_taken(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    own = make_adapter(
        model_folder("llama"),
        tmp_path / "own",
        rank_pattern={"q_proj": 2, "layers.1.self_attn.v_proj": 3},
    )
    assert exported(own).base is not None
    edited(own, rank_pattern={"q_proj": 2, "layers.1.self_attn.v_proj": 4})
    assert all("v_proj.lora_A.weight" in told for told in refusals(own))


@pytest.mark.parametrize("alpha", [-8, 0, 2.5])
def test_any_finite_strength_is_taken(alpha: float, adapter: Path) -> None:
    edited(adapter, lora_alpha=alpha)
    assert exported(adapter).base is not None
