"""A small model on one card or several, for tests on the CPU and on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.wrapping.engine import Engine, engine_of

ROWS, LENGTH, VOCABULARY = 8, 16, 96


def llama(layers: int = 5, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def batch(step: int = 0) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=drawn)
    return {"input_ids": ids, "labels": ids}


def wrapped(
    model: nn.Module, cards: int | None, device: str = "cpu", chunk_rows: int = 2, **how: Any
) -> Engine:
    """Wrap the model, by default with everything on the host."""
    request = PlacementRequest(
        **{"offload": "weights", "device_groups": 0, "resident_blocks": 0, **how}
    )
    fluxtrain.wrap(model, device=device, cards=cards or 1, chunk_rows=chunk_rows, placement=request)
    return engine_of(model)


def trained(model: nn.Module, cards: int | None, steps: int = 4, **how: Any) -> dict[str, Tensor]:
    """Train for some steps; return all weights and states, and what each loss was."""
    engine = wrapped(model, cards, **how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses: list[Tensor] = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    fluxtrain.sync(model)
    found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for name, tensors in engine.state_shards():
        found |= {f"{name} {key}": value.cpu().clone() for key, value in tensors.items()}
    fluxtrain.unwrap(model)
    return found | {"losses": torch.stack(losses)}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different
