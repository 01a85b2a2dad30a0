"""A step on several cards, simulated: one card's prediction on one card, and what two are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.plan.calibration import Calibration, HostTimes, Line
from fluxtrain.plan.dealing import Assignment, cards_of_chunks, spread_evenly
from fluxtrain.plan.facts import ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.rates import CardsRates, Rates, times_as_long
from fluxtrain.plan.simulation import StepTime, simulated
from fluxtrain.plan.work import step_work
from tests.unit.plan_models import group

FEW_PERCENT = 0.06
REACHED = 0.615  # of a matmul rate in a block, as the time model has it


def model(
    hidden: int, intermediate: int, layers: int, block: int, vocabulary: int = 128_256
) -> ModelFacts:
    """Blocks between an embedding and a head of their own, rows of 1024 tokens in bf16."""

    edge = vocabulary * hidden
    return ModelFacts(
        groups=(
            group("embed_tokens", edge, table_rows=vocabulary),
            *(group(f"layers.{i}", block) for i in range(layers)),
            group("norm", hidden),
            group("lm_head", edge),
        ),
        head_parameters=edge,
        row=RowFacts(
            hidden=hidden,
            vocabulary=vocabulary,
            sequence_length=1024,
            dtype_bytes=2,
            activation_bytes=activation_estimate(hidden, intermediate, 1024, 2),
        ),
    )


SMALL = model(1536, 8960, 28, 46_797_824, 151_936)
THREE = model(2048, 11_008, 36, 77_076_992, 151_936)
EIGHT = model(4096, 14_336, 32, 218_000_000)


def machine(flops: float, host_bytes_per_s: float, bus: float, **rest: Any) -> Rates:
    """A card that reaches `flops` in a block, and its host."""
    return Rates(
        has_gpu=True,
        matmul_per_s=flops / REACHED,
        adamw_per_s=host_bytes_per_s / 26,
        h2d_bytes_per_s=bus,
        d2h_bytes_per_s=bus,
        h2d_both_bytes_per_s=0.9 * bus,
        d2h_both_bytes_per_s=0.9 * bus,
        **rest,
    )


FAST = machine(470e12, 117e9, 55e9)
DESKTOP = machine(150e12, 180e9, 25e9)
TRIED = Calibration(
    forward=Line(base=0.0006, slope=0.0001),
    backward=Line(base=0.001, slope=0.0003),
    kept_backward=Line(base=0.0008, slope=0.0002),
    outside_forward=Line(base=0.002, slope=0.0023),
    outside_backward=Line(base=0.0023, slope=0.0),
    activation_bytes=91_619_328,
    device_update_s=1.6e-11,
    adamw_per_s=4.5e9,
    rows=(1, 4),
    measured_at_s=0.0,
    measuring_s=2.0,
)
QUEUED = HostTimes(
    forward=Line(base=0.0001, slope=0.0011),
    backward=Line(base=0.0002, slope=0.0016),
    forward_beside=Line(base=0.0006, slope=0.0012),
    backward_beside=Line(base=0.0003, slope=0.0017),
    offload_forward_s=0.0,
    offload_backward_s=0.0,
    outside_s=0.01,
    host_group_update_s=0.0001,
    device_update_s=0.0002,
)
STREAMED = Layout(offload="weights", batch_rows=8, chunk_rows=4, embedding="rows")
RESIDENT = Layout(offload="none", batch_rows=8, chunk_rows=4)
LAYOUTS = {
    "streamed": STREAMED,
    "12 groups on the device": replace(STREAMED, device_groups=12),
    "12 groups, 8 residents": replace(STREAMED, device_groups=12, resident_blocks=8),
    "32 rows": replace(STREAMED, batch_rows=32),
    "resident": RESIDENT,
    "blocks keep activations": replace(RESIDENT, blocks_without_recompute=20),
    "inputs on the host": replace(STREAMED, activations="host", batch_rows=32),
    "max": replace(STREAMED, offload="max"),
    "moments deferred": replace(STREAMED, deferred_moments=True),
    "the last chunk is smaller": replace(STREAMED, batch_rows=10),
    "whole embedding": replace(STREAMED, embedding="whole"),
}


def time_of(
    facts: ModelFacts,
    layout: Layout,
    rates: CardsRates,
    dealt: tuple[int, ...] | None = None,
    *,
    head_dealing: HeadDealing = "one_card",
    runs_by_chunks: bool = True,
    **stepping: Any,
) -> StepTime:
    number = len(rates.cards)
    dealt = dealt or tuple(at % number for at in range(facts.layers))
    model_dealt = Assignment(facts=facts, cards=dealt)
    work = step_work(model_dealt, [layout] * number, rates, head_dealing=head_dealing, **stepping)
    return simulated(work, rates, runs_by_chunks=runs_by_chunks)


def linked(rates: Rates, number: int, bytes_per_s: float | None = 389e9) -> CardsRates:
    every = range(number)
    peers = {(a, b): bytes_per_s for a in every for b in every if a != b and bytes_per_s}
    return CardsRates(cards=(rates,) * number, peers=peers)


def gain(
    number: int, chunks: int, head_dealing: HeadDealing = "summed", rows: int = 64, **rest: Any
) -> float:
    """How many times as fast as one card so many are: 8B without a link between the cards."""
    layout = replace(STREAMED, batch_rows=rows, chunk_rows=rows // chunks, deferred_moments=True)
    alone = time_of(EIGHT, replace(layout, chunk_rows=8), linked(DESKTOP, 1))
    cards = linked(DESKTOP, number, None)
    return alone.step_s / time_of(EIGHT, layout, cards, head_dealing=head_dealing, **rest).step_s


def test_two_cards_want_at_least_four_chunks() -> None:
    one, two, four, eight = (gain(2, chunks) for chunks in (1, 2, 4, 8))
    assert one < 1.0
    assert one < two < 1.8 < four
    assert eight == pytest.approx(four, rel=0.02)


def test_four_cards_want_at_least_eight_chunks() -> None:
    two, four, eight = (gain(4, chunks) for chunks in (2, 4, 8))
    assert two < four < 3.4 < eight


def test_neighbours_on_different_cards_overlap_and_halves_do_not() -> None:
    halves, fours, twos = (tuple(at // n % 2 for at in range(32)) for n in (16, 4, 2))
    by_blocks: dict[str, Any] = {"head_dealing": "one_card", "runs_by_chunks": False}
    found = [gain(2, 8, dealt=dealt, **by_blocks) for dealt in (halves, fours, twos)]
    in_turn = gain(2, 8, **by_blocks)
    assert found[0] == pytest.approx(1.05, abs=0.05)
    assert found[0] < found[1] < found[2] < in_turn


def test_runs_of_unequal_cards_are_worth_more_chunk_by_chunk() -> None:
    slower = machine(64e12, 65e9, 25e9)
    faster = machine(150e12, 65e9, 25e9)
    layout = replace(STREAMED, batch_rows=32, chunk_rows=4, deferred_moments=True)
    alone = time_of(EIGHT, layout, linked(faster, 1)).step_s
    both, dealt = CardsRates(cards=(faster, slower)), spread_evenly((22, 10))
    in_turn = alone / time_of(EIGHT, layout, both).step_s
    by_blocks = alone / time_of(EIGHT, layout, both, dealt, runs_by_chunks=False).step_s
    by_chunks = alone / time_of(EIGHT, layout, both, dealt).step_s
    assert in_turn < 1.0 < by_blocks < 1.2 < by_chunks < 1.43


def test_a_head_on_all_cards_is_worth_more_the_more_cards_there_are() -> None:
    two, four = (gain(n, 16) / gain(n, 16, "one_card") for n in (2, 4))
    assert 1.02 < two < four


@pytest.mark.parametrize("cards", [2, 3, 4])
def test_a_head_in_order_takes_as_long_as_the_sums_of_the_first_card(cards: int) -> None:
    rates, layout = replace(FAST, calibration=TRIED), replace(RESIDENT, batch_rows=64)

    def step_s(dealing: HeadDealing, facts: ModelFacts = EIGHT, link: float = 389e9) -> float:
        linked_cards = linked(rates, cards, link or None)
        return time_of(facts, layout, linked_cards, head_dealing=dealing).step_s

    whole_s = TRIED.outside_forward.at(64)
    saved_s = step_s("one_card") - step_s("in_order")
    assert saved_s == pytest.approx(whole_s * (1 / 2 if cards == 2 else 2 / 3), rel=0.1)
    assert step_s("in_order") < 1.01 * step_s("summed") or cards > 3
    frozen = replace(EIGHT, head_parameters=0)
    assert step_s("in_order", frozen) == pytest.approx(step_s("summed", frozen), rel=0.01)
    assert step_s("in_order", link=0.0) > step_s("one_card", link=0.0)  # slopes are wide


def test_chunks_of_a_head_in_order_are_dealt_by_what_the_first_card_does_beside() -> None:
    assert cards_of_chunks(6, 2, adds=True) == [0, 1, 1, 1, 0, 1]
    assert cards_of_chunks(5, 4, adds=True) == [1, 2, 3, 1, 2]
    assert cards_of_chunks(5, 3, adds=False) == [0, 1, 2, 0, 1]


def test_a_link_between_cards_is_worth_more_than_copies_through_the_host() -> None:
    layout = replace(RESIDENT, batch_rows=4, chunk_rows=1)
    slow_bus = replace(DESKTOP, h2d_bytes_per_s=2e9, h2d_both_bytes_per_s=2e9)
    fast, slow = (time_of(THREE, layout, linked(slow_bus, 2, rate)) for rate in (300e9, None))
    assert fast.step_s < slow.step_s


def test_one_thread_that_queues_for_all_cards_holds_small_chunks_up() -> None:
    rates = replace(FAST, calibration=replace(TRIED, host=QUEUED))
    layout = replace(RESIDENT, batch_rows=32)
    small, large = (
        time_of(THREE, replace(layout, chunk_rows=rows), linked(rates, 2)) for rows in (2, 8)
    )
    queued_s = THREE.layers * (QUEUED.forward.at(16) + QUEUED.backward.at(16))
    assert small.step_s >= queued_s
    assert small.busiest == "queueing"
    assert large.step_s < 0.6 * small.step_s


def test_moments_of_several_cards_do_not_slow_the_forward_pass_down() -> None:
    """They begin when it is queued; beside the backward pass the host has time to spare."""
    no_time = Line(base=0.0, slope=1e-6)
    slow = replace(
        QUEUED, forward_beside=QUEUED.forward.times(8.0), backward=no_time, backward_beside=no_time
    )
    layout = replace(STREAMED, batch_rows=64, chunk_rows=8, deferred_moments=True)

    def step_s(moments_per_s: float) -> float:
        rates = replace(
            FAST, calibration=replace(TRIED, host=slow), adamw_moments_per_s=moments_per_s
        )
        return time_of(THREE, layout, linked(rates, 4)).step_s

    assert step_s(20e9) == pytest.approx(step_s(1e12), rel=0.01)


def test_host_memory_is_a_floor_that_cards_do_not_lift() -> None:
    layout = replace(STREAMED, deferred_moments=True)
    bound = replace(linked(FAST, 4), host_bytes_per_s=100e9)
    moved = step_work(
        Assignment(facts=THREE, cards=tuple(at % 4 for at in range(36))), [layout] * 4, bound
    ).host_bytes
    parameters = sum(group.trained for group in THREE.groups)
    assert moved == pytest.approx(42 * parameters, rel=0.1)  # 36 of AdamW, 4 up, 2 down
    found = time_of(THREE, layout, bound)
    assert found.step_s >= moved / 100e9
    assert found.busiest == "host memory"


def test_cards_whose_bus_is_shared_are_each_as_fast_as_the_share() -> None:
    alone = CardsRates(cards=(DESKTOP,) * 2, up_together_bytes_per_s=25e9)
    both = alone.of([0, 1])
    assert [card.up for card in both.cards] == [12.5e9, 12.5e9]
    assert [card.down for card in both.cards] == [25e9, 25e9]
    assert alone.of([1]).cards[0] is DESKTOP


def test_rates_between_chosen_cards_keep_their_numbers() -> None:
    rates = CardsRates(cards=(FAST, DESKTOP, FAST), peers={(0, 2): 300e9, (2, 1): 10e9})
    chosen = rates.of([2, 0])
    assert chosen.peers == {(1, 0): 300e9}
    assert chosen.is_own_link(1, 0)
    assert not chosen.is_own_link(0, 1)


def test_a_slower_card_takes_as_many_times_as_long() -> None:
    slower = times_as_long(TRIED, 2.5)
    assert slower.forward.at(3) == pytest.approx(2.5 * TRIED.forward.at(3))
    assert slower.backward.at(3) == pytest.approx(2.5 * TRIED.backward.at(3))
    assert slower.host is TRIED.host


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 2), min_size=28, max_size=28).filter(lambda all_of: set(all_of) >= {0}),
    st.sampled_from(list(LAYOUTS.values())),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_no_step_is_shorter_than_what_the_busiest_resource_does_in_it(
    dealt: list[int], layout: Layout, chunk_rows: int, clips: bool
) -> None:
    numbers = {card: at for at, card in enumerate(sorted(set(dealt)))}
    cards = tuple(numbers[card] for card in dealt)
    layout = replace(layout, chunk_rows=chunk_rows, optimizer_in_backward=not clips)
    found = time_of(
        SMALL, layout, linked(FAST, len(numbers), None), cards, clips=clips, head_dealing="summed"
    )
    assert found.step_s >= max(found.busy_s.values()) * 0.999
    assert found.tokens_per_s == pytest.approx(found.work.tokens / found.step_s)
