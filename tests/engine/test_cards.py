"""Blocks dealt to several cards compute what one card computes, bit for bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import fluxtrain
from fluxtrain.core.cards.transfer import SeenOnFirstCard
from fluxtrain.core.runtime.arrivals import arrivals_of
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.plan import states
from fluxtrain.plan.request import PlacementRequest
from tests.on_cards import (
    LENGTH,
    ROWS,
    assert_same,
    batch,
    llama,
    trained,
    wrapped,
    wrapped_as_dealt,
)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("cards", [2, 3, 4])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"offload": "max"},
        {"resident_blocks": 2},
        {"device_groups": 3},
        {"activations": "host"},
        {"offload": "none"},
        {"embedding": "rows", "head": "chunks"},
    ],
    ids=str,
)
def test_weights_and_states_are_those_of_one_card(cards: int, how: dict[str, Any]) -> None:
    model = llama()
    other = copy.deepcopy(model)
    assert_same(trained(model, None, **how), trained(other, cards, **how))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_every_dtype_and_a_tied_head_train_to_the_bits_of_one_card(
    tied: bool, dtype: torch.dtype
) -> None:
    model = llama(tied=tied, dtype=dtype)
    other = copy.deepcopy(model)
    assert_same(trained(model, None, steps=3), trained(other, 2, steps=3))


def test_blocks_are_dealt_in_turn_and_every_card_copies_its_own() -> None:
    model = llama(5)
    engine = wrapped(model, 2)
    blocks = [unit for unit in engine.units if unit.group.kind == "block"]
    assert [unit.card for unit in blocks] == [0, 1, 0, 1, 0]
    assert all(unit.card == 0 for unit in engine.units if unit not in blocks)
    model(**batch()).loss.backward()
    engine.flush()
    for card in engine.cards:
        held = {slot.group for slot in card.window.slots if slot.group is not None}
        assert held and all(group.placement.card == card.number for group in held)


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "evaluation"])
def test_chunks_of_a_block_begin_before_those_of_the_one_before_have_all_ended(
    gradients: bool,
) -> None:
    """The next block's first chunk needs the first rows of its input alone."""
    model = llama(4)
    engine = wrapped(model, 2)
    seen: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for number, layer in enumerate(model.model.layers):

        def noted(module: nn.Module, args: Any, out: Any, number: int = number) -> None:
            plain = out.plain if isinstance(out, SeenOnFirstCard) else out
            arrivals = arrivals_of(plain)
            assert arrivals is not None
            seen.append((number, arrivals.spans))

        layer.register_forward_hook(noted)
    with torch.set_grad_enabled(gradients):
        loss = model(**batch()).loss
    if gradients:
        loss.backward()
    engine.flush()
    spans = ((0, 2), (2, 4), (4, 6), (6, 8))
    assert seen == [(number, spans) for number in range(4)]


DEALINGS = [(0, 0, 1, 0, 0, 1), (1, 1, 1, 0, 1, 1), (0, 0, 0, 1, 1, 1), (0, 1, 1, 2, 2, 0)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dealing", DEALINGS, ids=str)
def test_neighbours_on_one_card_have_different_lanes_and_the_bits_stay(
    dealing: tuple[int, ...],
) -> None:
    model = llama(6)
    other = copy.deepcopy(model)
    engine = wrapped_as_dealt(copy.deepcopy(model), dealing)
    blocks = [unit for unit in engine.units if unit.group.kind == "block"]
    assert [unit.card for unit in blocks] == list(dealing)
    for before, after in itertools.pairwise(blocks):
        assert (before.lane != after.lane) or before.card != after.card
        assert after.group.lane == after.lane
    assert_same(trained(model, None), trained(other, dealing))


@pytest.mark.parametrize("cards", [2, 3, 4])
def test_hidden_states_and_logits_without_gradients_are_those_of_one_card(cards: int) -> None:
    model = llama(5).eval()
    other = copy.deepcopy(model)
    wrapped(model, None)
    wrapped(other, cards)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            left, right = (one(**batch(), output_hidden_states=True) for one in (model, other))
            assert torch.equal(left.logits, right.logits)
            for a, b in zip(left.hidden_states, right.hidden_states, strict=True):
                assert a.shape == b.shape and a.device == b.device
                assert torch.equal(a, b)


def test_several_passes_a_step_and_updates_in_backward_keep_the_bits() -> None:
    found = []
    for cards in (None, 2):
        model = llama(5)
        engine = wrapped(model, cards)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(3):
            for part in range(2):
                (model(**batch(2 * step + part)).loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        for step in range(3):
            loss = model(**batch(step)).loss
            engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        fluxtrain.sync(model)
        found.append({n: v.clone() for n, v in model.state_dict().items()})
    assert_same(*found)


@pytest.mark.parametrize("frozen", ["plain", "nf4", "int8"])
@pytest.mark.thinned(2)
def test_adapters_on_frozen_and_packed_weights_keep_the_bits(
    frozen: states.StorageFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    found = []
    for cards in (None, 2):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(llama(4), config)
        fluxtrain.wrap(model, device="cpu", cards=cards, chunk_rows=2, frozen=frozen,
                       placement=PlacementRequest(offload="weights", device_groups=0))  # fmt: skip
        packed = any(group.dense_bytes for group in engine_of(model).groups)
        assert packed == (frozen != "plain")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        fluxtrain.sync(model)
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found.append({n: p.detach().clone() for n, p in trainable})
    assert_same(*found)


def test_a_state_of_one_card_is_loaded_by_two_and_back() -> None:
    def go_on(cards: int | None, shards: dict[str, Any] | None) -> tuple[Any, Any]:
        model = llama(4)
        engine = wrapped(model, cards)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for name, tensors in (shards or {}).items():
            engine.load_state_shard(name, tensors)
        for step in range(2):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        return {
            name: {key: value.clone() for key, value in tensors.items()}
            for name, tensors in engine.state_shards()
        }, model

    one, _ = go_on(None, None)
    two, _ = go_on(2, None)
    left, _ = go_on(2, one)
    right, _ = go_on(None, two)
    for name in left:
        assert_same(left[name], right[name])


def test_every_card_counts_what_it_holds_and_what_comes_to_it() -> None:
    model = llama(5)
    engine = wrapped(model, 2)
    for step in range(2):
        model(**batch(step)).loss.backward()
    engine.flush()
    used, traffic, place = engine.memory(), engine.traffic(), engine.residency()
    assert [card.number for card in used.cards] == [0, 1]
    assert used.device_used_bytes == sum(card.used_bytes for card in used.cards)
    assert all(sum(card.by.values()) == card.used_bytes for card in used.cards)
    assert traffic.h2d_bytes == sum(card[0] for card in traffic.cards)
    blocks = [group for group in engine.groups if group.kind == "block"]
    others = sum(group.weight_bytes for group in blocks if group.placement.card == 1)
    # its two blocks stay in its two slots; the second pass adds to the gradients of the first
    assert traffic.cards[1][0] == others + others
    hidden = ROWS * LENGTH * 32 * 2
    assert traffic.cards[1][2] >= 2 * 2 * 2 * hidden  # to its 2 blocks, and their gradients back
    assert place.cards == "01010"
