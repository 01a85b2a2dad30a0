"""Which layers get adapters where nobody names them, and which names are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.errors import BadInput
from fluxtrain.methods.adapters import adapter_tensors, attach_adapters

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STATES = {"state_size": 4, "time_step_rank": 4}
HYBRID = {
    "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 4,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1,
}  # fmt: skip


def made(kind: str, **more: Any) -> PreTrainedModel:
    shape = AutoConfig.for_model(kind, **SIZES | more)
    return AutoModelForCausalLM.from_config(shape)  # type: ignore[no-untyped-call, no-any-return]


def with_pictures() -> PreTrainedModel:
    """A model of text and pictures whose two parts have layers of equal names."""
    text = {**SIZES, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    shape = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    return AutoModelForCausalLM.from_config(shape)  # type: ignore[no-untyped-call, no-any-return]


def adapted(model: PreTrainedModel, targets: Any = "auto", rank: int = 4) -> tuple[set[str], str]:
    """Return the last names of the layers that have adapters, and the reason."""
    settings = MethodSettings(name="lora", rank=rank, targets=targets)
    found = attach_adapters(model, settings, ModelSettings(path="demo"))
    layers = {name.split(".lora_")[0] for name in adapter_tensors(model)}
    assert {name.removeprefix("base_model.model.") for name in layers} == set(found.layers)
    return {name.rpartition(".")[2] for name in layers}, found.because


@pytest.mark.parametrize(
    ("kind", "more", "expected", "left"),
    [
        (
            "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}, ATTENTION | DENSE,
            "shared_expert_gate (a gate of one value)",
        ),
        (
            "qwen3_next", {
                **EXPERTS, "shared_expert_intermediate_size": 24, "head_dim": 8,
                "mlp_only_layers": [0], "layer_types": ["full_attention"] * 2,
            }, ATTENTION, "peft takes its name for the experts'",
        ),
        ("mamba", STATES, {"in_proj"}, "out_proj (MambaMixer reads its weight past the layer)"),
        (
            "jamba", HYBRID, ATTENTION | DENSE | {"in_proj", "x_proj", "out_proj"},
            "router (a router), experts (matrices in one parameter)",
        ),
        (
            "lfm2", {"layer_types": ["conv", "full_attention"]},
            {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"}, "",
        ),
    ],
)  # fmt: skip
def test_layers_that_adapters_are_computed_beside_get_one_and_others_are_told(
    kind: str, more: dict[str, Any], expected: set[str], left: str
) -> None:
    names, because = adapted(made(kind, **more))
    assert names == expected
    assert left in because


def test_the_part_that_sees_pictures_gets_no_adapters_unless_they_are_of_text() -> None:
    model = with_pictures()
    towers = {name.rpartition(".")[2] for name, _ in model.named_modules() if "vision" in name}
    assert "q_proj" in towers, "both parts have layers of this name"
    names, because = adapted(model)
    assert names == ATTENTION | DENSE
    assert "(text does not reach it)" in because
    assert not any("vision" in name for name in adapter_tensors(model))
    assert adapted(with_pictures(), ["q_proj"])[0] == {"q_proj"}
    with pytest.raises(BadInput, match=r"fc1 cannot have an adapter: text does not reach it"):
        adapted(with_pictures(), ["q_proj", "fc1"])


@pytest.mark.parametrize(
    ("kind", "more", "target", "why"),
    [
        ("mamba", STATES, "out_proj", "reads its weight past the layer"),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}, "up_proj", "peft"),
    ],
)
def test_a_name_whose_adapter_would_not_be_trained_is_refused_with_the_reason(
    kind: str, more: dict[str, Any], target: str, why: str
) -> None:
    with pytest.raises(BadInput, match=rf"{why}.*; leave '{target}' out, or use auto"):
        adapted(made(kind, **more), [target])


class Past(nn.Module):
    """Reads a weight in a way that its source does not show."""

    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = dict(self.within.named_parameters())
        return nn.functional.linear(x, next(iter(weight.values())))


def test_an_adapter_that_the_forward_pass_does_not_call_is_refused() -> None:
    model = made("llama")
    for block in model.model.layers:
        block.mlp.down_proj = Past(block.mlp.down_proj)
    with pytest.raises(BadInput, match=r"text never passes through these 2 layers .* leave within"):
        adapted(model)


def test_adapters_that_break_the_forward_pass_are_refused() -> None:
    model = made("llama")
    block = model.model.layers[0].mlp
    forward = block.forward

    def strict(x: torch.Tensor) -> torch.Tensor:
        if not getattr(block.up_proj, "disable_adapters", True):
            raise TypeError("unsupported operand of an adapter")
        return forward(x)  # type: ignore[no-any-return]

    block.forward = strict
    with pytest.raises(BadInput, match=r"breaks with adapters \(unsupported operand of an adapter"):
        adapted(model)


def test_the_check_changes_neither_mode_nor_random_numbers_nor_what_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn() -> tuple[float, bool, set[str]]:
        torch.manual_seed(1)
        model = made("llama").train()
        adapted(model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        return float(torch.rand(1)), model.training, trained

    checked = drawn()
    monkeypatch.setattr("fluxtrain.methods.adapters.refuse_uncomputed", lambda _: None)
    assert checked == drawn()


def test_an_adapter_names_its_base_without_the_way_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = made("llama")
    attach_adapters(model, MethodSettings(name="lora", rank=4), ModelSettings(path="../base"))
    (config,) = model.peft_config.values()
    assert config.base_model_name_or_path == str(tmp_path / "base")
