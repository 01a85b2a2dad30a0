"""The placement over several cards: within each budget, the fastest predicted, and explained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.choose import LANDING_BUFFERS, place
from fluxtrain.plan.facts import Capacity, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import CardsRates
from fluxtrain.plan.request import ParallelRequest, RunRequest
from fluxtrain.plan.search import AUTO_SHARE, HOST_SHARE
from fluxtrain.units import GIB
from tests.unit.plan_models import group

HIDDEN, VOCABULARY = 1536, 32_000
ROW = RowFacts(
    hidden=HIDDEN,
    vocabulary=VOCABULARY,
    sequence_length=1024,
    dtype_bytes=2,
    activation_bytes=activation_estimate(HIDDEN, 8960, 1024, 2),
)
SET = RunRequest(batch_rows=16, chunk_rows=4)
FIXED = ParallelRequest(order="fixed")


def model(layers: int = 8, block: int = 46_797_824, **frozen: Any) -> ModelFacts:
    """Blocks between an embedding and a head of their own."""

    edge = VOCABULARY * HIDDEN
    return ModelFacts(
        groups=(
            group("embed_tokens", edge, table_rows=VOCABULARY),
            *(group(f"layers.{at}", block, **frozen) for at in range(layers)),
            group("norm", HIDDEN),
            group("lm_head", edge),
        ),
        head_parameters=edge,
        row=ROW,
    )


MODEL = model()


def rates(*flops: float, bus: float = 50e9) -> CardsRates:
    """Cards of these operations a second on one host, linked to each other."""
    from fluxtrain.plan.rates import Rates

    every = range(len(flops))
    return CardsRates(
        cards=tuple(
            Rates(
                has_gpu=True,
                matmul_per_s=one,
                adamw_per_s=4.5e9,
                h2d_bytes_per_s=bus,
                d2h_bytes_per_s=bus,
            )
            for one in flops
        ),
        peers={(a, b): 300e9 for a in every for b in every if a != b},
    )


def machine(*free_gib: float, host_gib: float = 200) -> CardsCapacity:
    return CardsCapacity(
        cards=tuple(
            CardCapacity(index=at, name="RTX 4090", free_bytes=int(free * GIB))
            for at, free in enumerate(free_gib)
        ),
        host_available_bytes=int(host_gib * GIB),
    )


def told(placement: Placement, name: str) -> tuple[str, str]:
    choice = next(one for one in placement.choices if one.name == name)
    return choice.value, choice.because


TWO = rates(250e12, 250e12)


def test_two_cards_are_taken_where_they_are_faster_and_the_plan_says_by_how_much() -> None:
    found = place(MODEL, machine(8, 8), SET, ParallelRequest(), rates=TWO)
    value, because = told(found, "parallel.cards")
    assert value == "2"
    assert "card 0 (RTX 4090), card 1 (RTX 4090)" in because
    assert "a step" in because and "with 1" in because
    assert [row.card for row in found.groups] == [0, *([0, 1] * 4), 0, 0]
    assert [card.blocks for card in found.cards] == [4, 4]
    assert found.step_s is not None
    assert told(found, "parallel.dealing")[0] == "[4, 4]"


def test_every_card_has_buffers_for_chunks_that_come_from_others() -> None:
    found = place(MODEL, machine(8, 8), SET, FIXED, rates=TWO)
    landing = LANDING_BUFFERS * 16 * 1024 * HIDDEN * 2
    assert [card.landing_bytes for card in found.cards] == [landing, landing]
    assert found.device_bytes == sum(card.device_bytes for card in found.cards)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.floats(3.0, 12), min_size=2, max_size=4),
    st.sampled_from(["auto", "memory", "even"]),
    st.booleans(),
    st.sampled_from([30.0, 200.0]),
)
def test_no_card_is_over_its_budget_and_all_together_not_over_the_host(
    free: list[float], dealing: Any, timed: bool, host_gib: float
) -> None:
    capacity = machine(*free, host_gib=host_gib)
    known = rates(*[250e12 / (1 + at) for at in range(len(free))]) if timed else None
    asked = ParallelRequest(cards=len(free), dealing=dealing, order="fixed")
    try:
        found = place(MODEL, capacity, SET, asked, rates=known)
    except DoesNotFit:
        return
    assert sum(card.blocks for card in found.cards) == MODEL.layers
    for card in found.cards:
        assert card.budget_bytes == capacity.cards[card.index].free_bytes
        assert card.device_bytes <= AUTO_SHARE * (card.budget_bytes or 0)
    assert found.need.host_bytes <= HOST_SHARE * host_gib * GIB
    assert [row.name for row in found.groups] == [group.name for group in MODEL.groups]
    assert all(row.card == 0 for row in found.groups if row.kind == "edge")
    assert (found.step_s is not None) == timed


@pytest.mark.parametrize("known", [None, TWO], ids=["by the rule", "timed"])
def test_what_fits_on_all_cards_together_streams_nothing(known: CardsRates | None) -> None:
    alone = place(MODEL, Capacity(device_free_bytes=7 * GIB, host_available_bytes=None), SET)
    assert alone.offload != "none"
    found = place(MODEL, machine(9, 9), SET, FIXED, rates=known)
    assert found.offload == "none"
    assert found.need.arena_bytes == 0
    assert [card.slots for card in found.cards] == [0, 0]


@pytest.mark.parametrize("timed", [False, True], ids=["by the rule", "timed, on a slow bus"])
def test_a_small_card_gets_the_blocks_that_it_holds_where_all_then_fit(timed: bool) -> None:
    known = rates(250e12, 250e12, bus=1e9) if timed else None
    found = place(MODEL, machine(9, 3.8), SET, FIXED, rates=known)
    even = place(MODEL, machine(9, 3.8), SET, replace(FIXED, dealing=(4, 4)), rates=known)
    assert (found.offload, even.offload) == ("none", "weights")
    assert [card.blocks for card in found.cards] == [5, 3]
    if timed:
        assert found.step_s is not None and even.step_s is not None
        assert found.step_s < even.step_s


def test_on_a_fast_bus_a_small_card_rather_streams_than_gets_fewer_blocks() -> None:
    found = place(MODEL, machine(9, 3.8), SET, FIXED, rates=TWO)
    fewer = place(MODEL, machine(9, 3.8), SET, replace(FIXED, dealing=(5, 3)), rates=TWO)
    assert [card.blocks for card in found.cards] == [4, 4]
    assert found.step_s is not None and fewer.step_s is not None
    assert found.step_s < fewer.step_s


def test_frozen_packed_weights_lie_on_both_cards_together() -> None:
    size = 400_000_000
    frozen = {"trained_bf16": 0, "frozen": size, "weight_bytes": size // 2, "storage": "nf4"}
    packed = model(8, size, **frozen, packed_bytes=size // 2, dense_bytes=2 * size)
    request = RunRequest(batch_rows=4, chunk_rows=1)
    alone = place(packed, machine(3.7), request, FIXED, rates=rates(1e14))
    both = place(packed, machine(3.7, 3.7), request, FIXED, rates=rates(1e14, 1e14))
    assert alone.slots > 0
    assert [card.slots for card in both.cards] == [0, 0]


def as_alone(placement: Placement) -> Placement:
    """The placement without the name of its card."""
    [card] = placement.cards
    return replace(placement, cards=(replace(card, index=None, name=""),))


def test_one_card_is_placed_as_without_others() -> None:
    capacity = Capacity(device_free_bytes=8 * GIB, host_available_bytes=200 * GIB)
    alone = place(MODEL, capacity, SET, rates=TWO.cards[0])
    assert as_alone(place(MODEL, machine(8), SET, ParallelRequest(), rates=rates(250e12))) == alone
    asked = place(MODEL, machine(8, 8), SET, ParallelRequest(cards=1), rates=TWO)
    assert as_alone(replace(asked, choices=alone.choices, left_out=())) == alone
    assert told(asked, "parallel.cards") == ("1", "as set")
    ruled = place(MODEL, capacity, SET)
    assert as_alone(place(MODEL, machine(8), SET, ParallelRequest())) == ruled


def test_the_card_that_computes_alone_is_named() -> None:
    """The first card may draw a screen, and have less memory left."""
    alone = replace(FIXED, cards=1)
    assert place(MODEL, machine(5, 8), SET, alone, rates=TWO).cards[0].index == 1
    assert place(MODEL, machine(8, 8), SET, alone, rates=TWO).cards[0].index == 0
    assert (
        place(MODEL, machine(8), SET, ParallelRequest(), rates=rates(250e12)).cards[0].index is None
    )


def test_a_card_that_would_hold_the_others_up_is_left_out_and_that_is_said() -> None:
    found = place(MODEL, machine(8, 8), SET, ParallelRequest(), rates=rates(250e12, 3e12))
    assert len(found.cards) == 1
    assert told(found, "parallel.cards")[0] == "1"
    (left,) = found.left_out
    assert (left.index, left.name) == (1, "RTX 4090")
    assert "predicted with it" in left.because and "without" in left.because


def test_every_card_that_does_not_compute_is_told_with_its_reason() -> None:
    cards = list(machine(8, 8, 8).cards)
    cards[2] = replace(cards[2], unusable="other programs fill it: end them")
    some = CardsCapacity(cards=tuple(cards), host_available_bytes=200 * GIB)
    three = rates(250e12, 250e12, 250e12)
    found = place(MODEL, some, SET, FIXED, rates=three)
    assert [(one.index, one.because) for one in found.left_out] == [(2, cards[2].unusable)]
    asked = place(MODEL, some, SET, replace(FIXED, cards=(1,)), rates=three)
    assert [one.index for one in asked.left_out] == [0, 2]
    assert asked.left_out[0].because.startswith("as set")
    for wish in (replace(FIXED, cards="auto"), replace(FIXED, cards=2)):
        small = place(model(1), machine(8, 8), SET, wish, rates=TWO)
        assert [one.because for one in small.left_out] == ["the model has 1 block"]


def test_a_placement_tells_each_card_and_what_binds_the_pipeline() -> None:
    found = place(MODEL, machine(8, 8), SET, FIXED, rates=TWO)
    assert [(one.number, one.index, one.blocks, one.edges) for one in found.told_cards] == [
        (0, 0, 4, True), (1, 1, 4, False),
    ]  # fmt: skip
    assert sum(one.device_bytes for one in found.told_cards) == found.device_bytes
    assert found.time is not None and found.time.busy_s and found.time.binds


def test_the_fastest_card_comes_first_and_has_the_edges() -> None:
    found = place(MODEL, machine(8, 8), SET, FIXED, rates=rates(100e12, 250e12))
    assert [card.index for card in found.cards] == [1, 0]
    assert found.cards[0].blocks > found.cards[1].blocks


def test_of_equally_fast_cards_the_one_with_more_memory_comes_first() -> None:
    found = place(MODEL, machine(7, 8), SET, FIXED, rates=rates(250e12, 249e12))
    assert [card.index for card in found.cards] == [1, 0]


def test_cards_of_a_list_keep_their_order() -> None:
    asked = replace(FIXED, cards=(2, 0), dealing=(3, 5))
    found = place(MODEL, machine(8, 8, 8), SET, asked, rates=rates(1e14, 1e14, 1e14))
    assert [(card.index, card.blocks) for card in found.cards] == [(2, 3), (0, 5)]


def test_of_more_cards_than_blocks_as_many_as_blocks_compute() -> None:
    small = model(layers=2)
    asked = replace(FIXED, cards=3)
    found = place(small, machine(8, 8, 8), SET, asked, rates=rates(1e14, 1e14, 1e14))
    assert [card.blocks for card in found.cards] == [1, 1]
    assert "the model has 2 blocks" in told(found, "parallel.cards")[1]


def test_neighbours_on_one_card_have_slots_for_their_run_and_one_copy() -> None:
    asked = replace(FIXED, dealing=(6, 2))
    found = place(MODEL, machine(4.2, 4.2), SET, asked, rates=TWO)
    runs = [card.longest_run for card in found.cards]
    assert max(runs) > 1
    for card in found.cards:
        assert card.slots in (0, 1) or card.slots > card.longest_run


def test_by_itself_there_are_at_least_two_chunks_a_card_where_that_is_faster() -> None:
    request = RunRequest(batch_rows=16)
    slow_compute = rates(5e12, 5e12)
    found = place(MODEL, machine(8, 8), request, FIXED, rates=slow_compute)
    assert found.chunk_rows is not None
    assert 16 // found.chunk_rows >= 4
    assert "chunks keep 2 cards busy" in told(found, "placement.chunk_rows")[1]


def test_the_head_is_on_all_cards_where_that_pays_and_the_order_is_free() -> None:
    wide = replace(MODEL, row=replace(ROW, vocabulary=100_000))
    free = ParallelRequest(cards=4, order="fast")
    four = (machine(9, 9, 9, 9), rates(*[250e12] * 4))
    fast = place(wide, four[0], SET, free, rates=four[1])
    fixed = place(wide, four[0], SET, replace(FIXED, cards=4), rates=four[1])
    assert (fast.head_dealing, fixed.head_dealing) == ("summed", "in_order")
    assert fast.step_s is not None and fixed.step_s is not None
    assert fast.step_s < fixed.step_s
    assert told(fast, "parallel.order")[0] == "fast"
    order, because = told(fixed, "parallel.order")
    assert order == "fixed"
    assert because.startswith("as set: the bits of one card with the same chunks; ")
    assert "with the head on all cards, and" in because


def test_on_two_cards_the_order_of_one_is_no_slower() -> None:
    wide = replace(MODEL, row=replace(ROW, vocabulary=100_000))
    many = RunRequest(batch_rows=64, chunk_rows=8)
    found = place(wide, machine(20, 20), many, ParallelRequest(cards=2, order="fast"), rates=TWO)
    assert found.head_dealing == "in_order"
    order, because = told(found, "parallel.order")
    assert order == "fixed" and because.startswith("one card's order of sums is no slower; ")


@pytest.mark.parametrize("gib", [5.0, 6.0, 7.0, 8.0, 9.0, 10.5])
def test_a_head_on_all_cards_is_whole_on_each(gib: float) -> None:
    """In vocabulary chunks it is computed by one card, whatever the plan says."""
    wide = replace(MODEL, row=replace(ROW, vocabulary=128_000), head_parameters=128_000 * HIDDEN)
    for order in ("fixed", "fast"):
        found = place(
            wide, machine(gib, gib), SET, ParallelRequest(cards=2, order=order), rates=TWO
        )
        assert found.head_dealing == "one_card" or found.layout.head == "whole"


@pytest.mark.parametrize("cards", [2, 3, 4])
def test_one_chunk_of_tokens_stays_on_one_card(cards: int) -> None:
    few = RunRequest(batch_rows=8, chunk_rows=1)  # 8,192 tokens of 32,000 words
    found = place(
        MODEL,
        machine(*[9] * cards),
        few,
        replace(FIXED, cards=cards),
        rates=rates(*[250e12] * cards),
    )
    assert found.head_dealing == "one_card"


def test_slopes_that_would_take_longer_than_the_head_stay_on_one_card() -> None:
    wide = replace(MODEL, row=replace(ROW, vocabulary=400_000))
    through_host = replace(TWO, peers={})
    found = place(wide, machine(9, 9), SET, replace(FIXED, cards=2), rates=through_host)
    assert found.head_dealing == "one_card"
    because = told(found, "parallel.order")[1]
    assert because == "as set: the bits of one card with the same chunks"


def test_without_rates_every_card_that_can_be_used_computes_by_the_rule() -> None:
    found = place(MODEL, machine(8, 8), SET, ParallelRequest())
    assert len(found.cards) == 2
    assert found.step_s is None
    assert "no times are known" in told(found, "parallel.cards")[1]


@pytest.mark.parametrize("row", [ROW, None], ids=["rows known", "any rows"])
def test_without_rates_a_card_that_the_model_does_not_fit_with_is_left_out(
    row: RowFacts | None,
) -> None:
    facts = replace(MODEL, row=row)
    found = place(facts, machine(24, 0.05), SET, ParallelRequest())
    assert len(found.cards) == 1 and found.cards[0].index == 0
    assert [(one.index, one.because) for one in found.left_out] == [(1, "no layout with it fits")]
    two = place(facts, machine(0.05, 8, 8), SET, ParallelRequest())
    assert [card.index for card in two.cards] == [1, 2]
    with pytest.raises(DoesNotFit):
        place(facts, machine(24, 0.05), SET, ParallelRequest(cards=(0, 1)))


def test_without_a_gpu_pretended_cards_compute_only_where_they_are_asked_for() -> None:
    pretended = CardsCapacity(
        cards=(CardCapacity(index=0), CardCapacity(index=1)), host_available_bytes=64 * GIB
    )
    assert place(MODEL, pretended, SET, ParallelRequest()).several_cards is False
    found = place(MODEL, pretended, SET, ParallelRequest(cards=2))
    assert [card.blocks for card in found.cards] == [4, 4]
    assert [card.budget_bytes for card in found.cards] == [None, None]
    assert found.offload == "weights"


def test_rows_need_not_be_known() -> None:
    unknown = replace(MODEL, row=None)
    found = place(unknown, machine(8, 8), RunRequest(), ParallelRequest(), rates=TWO)
    assert [row.card for row in found.groups].count(1) == found.cards[1].blocks > 0
    assert found.batch_rows == 0


def test_a_batch_left_to_the_planner_is_one_of_its_own() -> None:
    found = place(MODEL, machine(8, 8), RunRequest(data_rows=20), FIXED, rates=TWO)
    assert found.batch_rows in (1, 2, 4, 8, 16)
