"""What several cards are refused, in words with the numbers and the cure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.choose import place
from fluxtrain.plan.request import ParallelRequest
from fluxtrain.units import GIB
from tests.unit.test_plan_cards_choose import FIXED, MODEL, SET, TWO, machine, model, rates


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cards": 3}, ["parallel.cards = 3", "2 can be used", "card 1 (RTX 4090)"]),
        ({"cards": (0, 5)}, ["card 5", "card 0 (RTX 4090), card 1"]),
        ({"cards": (1, 1)}, ["card 1 is named twice"]),
        ({"cards": 0}, ["parallel.cards is 0"]),
        ({"cards": "both"}, ["parallel.cards is 'both'"]),
        ({"dealing": (4, 5)}, ["deals 9 blocks", "has 8", "[4, 4]"]),
        ({"dealing": (3, 3, 2)}, ["numbers for 3 cards", "2 can be used"]),
        ({"dealing": (4, 4), "cards": (0,)}, ["2 numbers for 1 cards"]),
        ({"dealing": "random"}, ["parallel.dealing is 'random'", "speed"]),
        ({"dealing": (8, 0)}, ["parallel.dealing is (8, 0)"]),
        ({"dealing": ()}, ["parallel.dealing is ()"]),
        ({"cards": 1025}, ["parallel.cards is 1025"]),
        ({"order": "loose"}, ["parallel.order is 'loose'", "fixed"]),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_cure(
    asked: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(BadInput) as refused:
        place(MODEL, machine(8, 8), SET, ParallelRequest(**asked), rates=TWO)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_numbers_for_more_cards_than_blocks_are_told_by_the_blocks() -> None:
    asked = replace(FIXED, cards=3, dealing=(1, 1, 1))
    with pytest.raises(BadInput, match="deals 3 blocks and the model has 2"):
        place(model(2), machine(8, 8, 8), SET, asked, rates=rates(1e14, 1e14, 1e14))


def test_a_card_that_cannot_be_used_is_refused_where_it_is_named() -> None:
    old = CardCapacity(index=0, name="GTX 1080", free_bytes=8 * GIB, unusable="it has no bf16")
    only = CardsCapacity(cards=(old,), host_available_bytes=None)
    for asked in (ParallelRequest(cards=(0,)), ParallelRequest()):
        with pytest.raises(BadInput, match="GTX 1080.*it has no bf16"):
            place(MODEL, only, SET, asked)


def test_a_refusal_names_the_card_the_numbers_and_the_cure() -> None:
    with pytest.raises(DoesNotFit) as refused:
        place(MODEL, machine(8, 1), SET, replace(FIXED, cards=2), rates=TWO)
    words = str(refused.value)
    assert words.startswith("card 1 (RTX 4090)")
    assert "of device memory" in words and "leave it out of parallel.cards" in words


def test_a_card_with_room_for_some_rows_says_how_many() -> None:
    with pytest.raises(DoesNotFit) as refused:
        place(MODEL, machine(8, 1.2), SET, replace(FIXED, cards=2), rates=TWO)
    words = str(refused.value)
    assert "4 of 8 blocks" in words and "parallel.cards" in words


def test_a_host_too_small_for_all_cards_is_told_what_would_fit() -> None:
    narrow = model(layers=8)
    narrow = replace(narrow, groups=tuple(replace(g, narrow=g.trained) for g in narrow.groups))
    asked = replace(FIXED, cards=2)
    with pytest.raises(DoesNotFit) as refused:
        place(narrow, machine(3.2, 3.2, host_gib=5), SET, asked, rates=TWO)
    assert "host of 2 cards" in str(refused.value)
    assert "train.states=8bit fits with" in str(refused.value)
