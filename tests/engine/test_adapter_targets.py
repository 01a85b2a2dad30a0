"""Which layers get adapters where nobody names them."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.methods.adapters import adapter_tensors, attach_adapters


def test_a_gate_of_one_value_is_no_target_and_the_layers_beside_it_are() -> None:
    model = AutoModelForCausalLM.from_config(
        Qwen2MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, num_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=24, shared_expert_intermediate_size=24,
        )
    )  # fmt: skip
    attach_adapters(model, MethodSettings(name="lora", rank=16), ModelSettings(path="demo"))
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter_tensors(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
