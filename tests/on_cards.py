"""A small model on one card or several, for tests on the CPU and on GPUs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.data.demo import demo_files
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.request import PlacementRequest

ROWS, LENGTH, VOCABULARY = 8, 16, 96


def llama(
    layers: int = 5, tied: bool = False, dtype: torch.dtype = torch.bfloat16, width: int = 32
) -> nn.Module:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
        tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def wide(layers: int, vocabulary: int = VOCABULARY) -> nn.Module:
    """The same with more to compute: several milliseconds a block on a GPU."""
    torch.manual_seed(4)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=vocabulary, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def saved_with_demo_tokenizer(folder: Path, **sizes: int) -> Path:
    """Save a bf16 model for the demo's texts, with their tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(demo_files().tokenizer)
    torch.manual_seed(0)
    usual = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
             "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
    config = LlamaConfig(**usual | sizes, vocab_size=len(tokenizer))
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def wrapped_as_dealt(
    model: nn.Module, dealing: Sequence[int], device: str = "cpu", frozen: Any = "plain", **how: Any
) -> Engine:
    """Wrap the model with its blocks on these cards, in order."""
    plain = copy.deepcopy(model)
    plan = wrapped(plain, max(dealing) + 1, device, **how).plan
    fluxtrain.unwrap(plain)
    cards = iter(dealing)
    rows = [replace(row, card=next(cards)) if row.kind == "block" else row for row in plan.groups]
    slots = tuple(replace(card, slots=2) for card in plan.cards)
    placement = replace(plan, groups=tuple(rows), cards=slots)
    number = max(dealing) + 1
    fluxtrain.wrap(model, device=device, cards=number, placement=placement, frozen=frozen)
    return engine_of(model)


def trained(
    model: nn.Module,
    cards: int | Sequence[int] | None,
    steps: int = 4,
    head_dealing: HeadDealing = "one_card",
    head_tokens: int | None = None,
    **how: Any,
) -> dict[str, Tensor]:
    """Train for some steps on so many cards, or with the blocks dealt so, and the head's tokens in
    such chunks; return all weights and states, and what each loss was."""
    if isinstance(cards, Sequence):
        engine = wrapped_as_dealt(model, cards, **how)
    else:
        engine = wrapped(model, cards, **how)
    engine.plan = replace(engine.plan, head_dealing=head_dealing)
    engine.head_tokens = head_tokens
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
