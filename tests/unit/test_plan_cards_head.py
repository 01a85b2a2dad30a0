"""What a head takes of each card that its tokens are dealt to: its weight for good, and the rest in
turn with what a block's backward pass takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxtrain.plan.choose import place
from fluxtrain.plan.dealing import LANDED_SLOPES, SENT_SLOPES, Assignment
from fluxtrain.plan.facts import FP32_BYTES, ModelFacts
from fluxtrain.plan.footprint import HIDDEN_AT_LOSS, footprint
from fluxtrain.plan.heads import logits_bytes
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import CardsRates
from fluxtrain.plan.request import Order, ParallelRequest
from fluxtrain.train.live.edit import changed
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import Change
from fluxtrain.units import GIB
from tests.unit.test_plan_cards_choose import HIDDEN, MODEL, ROW, SET, TWO, machine, model


def wide(vocabulary: int) -> ModelFacts:
    return replace(
        MODEL, row=replace(ROW, vocabulary=vocabulary), head_parameters=vocabulary * HIDDEN
    )


def placed(facts: ModelFacts, order: Order, rates: CardsRates = TWO) -> Placement:
    how = ParallelRequest(cards=2, order=order, dealing=(4, 4))
    return place(facts, machine(200, 200), SET, how, rates=rates)


UNLINKED = replace(TWO, peers={})  # a head in order stays on one card


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
    fast, fixed = placed(facts, "fast", UNLINKED), placed(facts, "fixed", UNLINKED)
    assert (fast.head_dealing, fixed.head_dealing) == ("summed", "one_card")
    assert fast.layout == replace(fixed.layout, deferred_moments=fast.layout.deferred_moments)
    first, other = (a.device_bytes - b.device_bytes
                    for a, b in zip(fast.cards, fixed.cards, strict=True))  # fmt: skip
    copy = facts.head_dtype_bytes * facts.head_parameters
    share = Assignment(facts=facts, cards=(0,) * 4 + (1,) * 4).share(1)
    block = footprint(share, fixed.layout, has_gpu=True).workspace_bytes
    assert first == 0
    assert other == copy + max(0, of_loss(facts) - block)


@pytest.mark.parametrize("vocabulary", [150_000, 4_000_000])
def test_in_order_the_first_card_has_slopes_of_others_and_these_have_no_sum(
    vocabulary: int,
) -> None:
    facts = wide(vocabulary)
    here, there = placed(facts, "fixed"), placed(facts, "fixed", UNLINKED)
    assert (here.head_dealing, there.head_dealing) == ("in_order", "one_card")
    row, copy = facts.row, facts.head_dtype_bytes * facts.head_parameters
    assert row is not None and SET.batch_rows is not None
    logits = logits_bytes(row, SET.batch_rows, row.vocabulary, 0, has_gpu=True)
    share = Assignment(facts=facts, cards=(0,) * 4 + (1,) * 4)
    first, other = (
        footprint(share.share(card), there.layout, has_gpu=True).workspace_bytes for card in (0, 1)
    )
    grown = [a.device_bytes - b.device_bytes
             for a, b in zip(here.cards, there.cards, strict=True)]  # fmt: skip
    hidden = HIDDEN_AT_LOSS * SET.batch_rows * row.block_input_bytes
    sums = FP32_BYTES * facts.head_parameters
    assert grown[0] == max(0, hidden + sums + (1 + LANDED_SLOPES) * logits - first)
    assert grown[1] == copy + max(0, hidden + SENT_SLOPES * logits - other)


def test_a_change_while_it_runs_counts_the_larger_of_the_two_as_well() -> None:
    facts = replace(wide(4_000_000), groups=model(8).groups)
    before = placed(facts, "fast", UNLINKED)
    run = LiveRun(facts, before, has_gpu=True)
    change = Change(name="blocks_without_recompute", value=8)
    after = run.placement_with(changed(run, run.planned, change))
    kept = sum(row.activations == "kept" and row.card == 1 for row in after.groups)
    grown = after.cards[1].device_bytes - before.cards[1].device_bytes
    assert kept == 4 and facts.row is not None
    assert grown == kept * before.batch_rows * facts.row.kept_bytes
    assert after.cards[1].device_bytes < 200 * GIB
