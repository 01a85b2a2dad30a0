"""An adapter's configuration that disagrees with its tensors, or that peft cannot carry out, is
refused with code 2 and the reason, before the base is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.models import loading
from fluxtrain.results.adapter import attached
from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.used_models import opened

NAN, INFINITY = float("nan"), float("inf")


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
        ({"r": 8}, r"size mismatch for \S*lora_A.*\[4, 32\].*\[8, 32\]"),
        ({"rank_pattern": {"q_proj": 4_000_000_000}}, r"size mismatch for \S*q_proj.lora_A"),
        ({"r": 10**30}, "--base"),
        ({"r": "4"}, "TypeError"),
        ({"lora_alpha": NAN}, "lora_alpha is not finite"),
        ({"alpha_pattern": {"q_proj": INFINITY}}, "alpha_pattern is not finite"),
        ({"lora_alpha": 10**400}, "OverflowError"),
        ({"target_modules": 3}, "--base|by peft"),
        ({"target_modules": "("}, "--base"),
        ({"target_modules": ["nowhere"]}, "'nowhere'} not found in the base model"),
        ({"bias": "x"}, "Requested bias: x, is not implemented"),
        ({"megatron_config": {"a": 1}}, "No module named 'megatron'"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3, and no name"),
    ],
)
def test_a_value_that_peft_cannot_carry_out_is_refused_before_weights_are_read(
    changes: dict[str, Any], says: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights of the base are read")

    monkeypatch.setattr(loading, "_weights", read)
    edited(adapter, **changes)
    for told in refusals(adapter):
        assert re.search(says, told), told
        assert "adapter" in told and "\n" not in told


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

    monkeypatch.setattr(attached, "get_peft_model", full)
    with pytest.raises(MemoryError), opened(adapter):
        pass
