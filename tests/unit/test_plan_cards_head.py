"""What a head takes of each card that its tokens are dealt to: its weight for good, and the rest in
turn with what a block's backward pass takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxtrain.live.cards.changed import changed_on_cards
from fluxtrain.plan.cards.choose import place_on_cards
from fluxtrain.plan.cards.request import ParallelRequest
from fluxtrain.plan.cards.shares import Dealt
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.facts import FP32_BYTES, ModelFacts
from fluxtrain.plan.footprint import HIDDEN_AT_LOSS, footprint
from fluxtrain.plan.heads import logits_bytes
from fluxtrain.units import GIB
from tests.unit.test_plan_cards_choose import HIDDEN, MODEL, ROW, SET, TWO, machine, model


def wide(vocabulary: int) -> ModelFacts:
    return replace(
        MODEL, row=replace(ROW, vocabulary=vocabulary), head_parameters=vocabulary * HIDDEN
    )


def placed(facts: ModelFacts, order: str) -> Placement:
    how = ParallelRequest(cards=2, order=order, dealing=(4, 4))  # type: ignore[arg-type]
    return place_on_cards(facts, machine(200, 200), TWO, SET, how)


def of_loss(facts: ModelFacts) -> int:
    """The sum of the weight's gradient, logits of a chunk, hidden states and their gradient."""
    row, batch = facts.row, SET.batch_rows
    assert row is not None and batch is not None
    logits = logits_bytes(row, batch, row.vocabulary, 0, has_gpu=True)
    hidden = HIDDEN_AT_LOSS * batch * row.block_input_bytes
    return FP32_BYTES * facts.head_parameters + logits + hidden


@pytest.mark.parametrize("vocabulary", [150_000, 400_000, 4_000_000])
def test_the_other_cards_peak_grows_by_the_weight_and_what_a_block_leaves_over(
    vocabulary: int,
) -> None:
    facts = wide(vocabulary)
    fast, fixed = placed(facts, "fast"), placed(facts, "fixed")
    assert fast.head_on_all_cards and not fixed.head_on_all_cards
    assert fast.layout == replace(fixed.layout, deferred_moments=fast.layout.deferred_moments)
    first, other = (a.device_bytes - b.device_bytes
                    for a, b in zip(fast.cards, fixed.cards, strict=True))  # fmt: skip
    copy = facts.head_dtype_bytes * facts.head_parameters
    share = Dealt(facts=facts, cards=(0,) * 4 + (1,) * 4).share(1)
    block = footprint(share, fixed.layout, has_gpu=True).workspace_bytes
    assert first == 0
    assert other == copy + max(0, of_loss(facts) - block)


def test_a_change_while_it_runs_counts_the_larger_of_the_two_as_well() -> None:
    facts = replace(wide(4_000_000), groups=model(8).groups)
    before = placed(facts, "fast")
    after = changed_on_cards(facts, before, "blocks_without_recompute", 8, has_gpu=True)
    kept = sum(row.activations == "kept" and row.card == 1 for row in after.groups)
    grown = after.cards[1].device_bytes - before.cards[1].device_bytes
    assert kept == 4 and facts.row is not None
    assert grown == kept * before.batch_rows * facts.row.kept_bytes
    assert after.cards[1].device_bytes < 200 * GIB
