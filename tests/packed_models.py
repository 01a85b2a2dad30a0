"""Small models with packed weights, and the same with what these unpack to."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.quantization import reference
from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.plan.states import PackedFormat

LAYOUTS: list[dict[str, Any]] = [
    {"offload": "none"},
    {"offload": "optimizer"},
    {"offload": "weights"},
    {"offload": "max"},
    {"offload": "weights", "placement": fluxtrain.PlacementRequest(resident_blocks=2)},
    {
        "offload": "optimizer",
        "placement": fluxtrain.PlacementRequest(blocks_without_recompute=4),
    },
]
BASE = "layers."
LEAST = 1024
WORDS = 128


def llama(width: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width // 2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        use_cache=False,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config).bfloat16()


def with_unpacked(model: nn.Module, storage: PackedFormat) -> None:
    """Replace each large weight of a block by what its packed form unpacks to."""
    for name, parameter in model.named_parameters():
        if BASE in name and parameter.numel() >= LEAST:
            layout = PackedLayout.of(storage, [parameter.shape])
            packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
            reference.pack(layout, 0, parameter.data, packed)
            out = torch.empty(layout.elements, dtype=parameter.dtype)
            reference.unpack(layout, packed, out)
            parameter.data = out[: parameter.numel()].view(parameter.shape).clone()


def adapted(model: nn.Module, **settings: Any) -> Any:
    config = LoraConfig(
        r=8,
        target_modules="all-linear",
        exclude_modules=["lm_head"],
        task_type="CAUSAL_LM",
        **settings,
    )
    made = get_peft_model(cast(Any, model), config, autocast_adapter_dtype=False)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return made.train()


def trained(model: nn.Module, steps: int = 3, shape: tuple[int, int] = (4, 24)) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    random = torch.Generator().manual_seed(5)
    losses = []
    torch.manual_seed(9)
    for _ in range(steps):
        ids = torch.randint(0, WORDS, shape, generator=random)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses
