"""The head's loss with its tokens dealt to all cards, beside the head on one card."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import Engine
from fluxtrain.plan.heads import HeadDealing
from tests.on_cards import VOCABULARY, batch, llama, wrapped


def shared(engine: Engine, dealing: HeadDealing = "summed") -> Engine:
    engine.plan = replace(engine.plan, head_dealing=dealing)
    return engine


def gradients(model: nn.Module, step: int = 0, **how: Any) -> dict[str, Tensor]:
    loss = model(**batch(step), **how).loss
    loss.backward()
    found = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found | {"loss": loss.detach().float()}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], most: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        scale = float(value.abs().max()) or 1.0
        assert float((right[name] - value).abs().max()) <= most * scale, name


@pytest.mark.thinned(3)
@pytest.mark.parametrize("cards", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_a_head_on_one_card(
    cards: int, tied: bool, dtype: torch.dtype
) -> None:
    model = llama(4, tied=tied, dtype=dtype)
    other = copy.deepcopy(model)
    wrapped(model, cards)
    engine = shared(wrapped(other, cards))
    most = 1e-5 if dtype == torch.float32 else 2e-2
    for step in range(2):
        assert_close(gradients(model, step), gradients(other, step), most)
    assert all(card.head_weight is not None for card in engine.cards[1:])


def soft_capped() -> nn.Module:
    torch.manual_seed(2)
    config = Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCABULARY, final_logit_softcapping=3.0,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).train()
    model.lm_head = nn.Linear(32, VOCABULARY, bias=True)
    return model


@pytest.mark.parametrize("dealing", ["summed", "in_order"])
def test_soft_caps_and_a_bias_are_applied_on_every_card(dealing: HeadDealing) -> None:
    model = soft_capped()
    other = copy.deepcopy(model)
    for engine in (wrapped(model, 2), shared(wrapped(other, 2), dealing)):
        engine.head_tokens = 5
    assert_close(gradients(model), gradients(other), 1e-5 if dealing == "summed" else 0.0)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("cards", [2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_order_all_cards_give_the_bits_of_one(
    cards: int, tied: bool, trained: bool, dtype: torch.dtype
) -> None:
    model = llama(4, tied=tied, dtype=dtype)
    model.lm_head.weight.requires_grad_(trained)
    other = copy.deepcopy(model)
    alone, engine = wrapped(model, 1), shared(wrapped(other, cards), "in_order")
    for each in (alone, engine):
        each.head_tokens = 3  # the last chunk has fewer
    for step in range(2):
        wanted, found = gradients(model, step), gradients(other, step)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert all(card.head_weight is not None for card in engine.cards[1:])


def test_a_changed_weight_reaches_every_card_and_an_unchanged_one_is_not_sent_again() -> None:
    model = llama(3, dtype=torch.float32)
    other = copy.deepcopy(model)
    wrapped(model, 2)
    engine = shared(wrapped(other, 2))
    for one in (model, other):
        optimizer = torch.optim.AdamW(one.parameters(), 1e-2)
        for step in range(3):
            one(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with engine.evaluating(), torch.no_grad():
        before = engine.traffic().cards[1][2]
        first = other(**batch(9)).loss
        once = engine.traffic().cards[1][2] - before
        second = other(**batch(9)).loss
        twice = engine.traffic().cards[1][2] - before - once
        plain = model(**batch(9)).loss
    assert torch.equal(first, second)
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-4)
    assert once - twice == VOCABULARY * 32 * 4


def test_fewer_tokens_than_cards_stay_on_the_first_card() -> None:
    model = llama(3)
    engine = shared(wrapped(model, 4))
    ids = batch()["input_ids"][:1, :2]
    model(input_ids=ids, labels=ids).loss.backward()
    engine.flush()
    assert all(card.head_weight is None for card in engine.cards)
    fluxtrain.unwrap(model)
