"""Blocks dealt to several cards compute what one card computes, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.on_cards import assert_same, llama, trained


@pytest.mark.parametrize("cards", [2, 3])
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
