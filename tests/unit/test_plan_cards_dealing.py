"""Blocks dealt to cards: every block once, spread over the model, by speed, memory or as given."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.plan.dealing import (
    DealingRule,
    DealtCard,
    counts_of,
    deal,
    runs_of,
    spread_evenly,
)

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
RULES = st.sampled_from(["auto", "speed", "memory", "even"])


def cards(*seconds: float | None) -> list[DealtCard]:
    return [DealtCard(block_s=one, memory_bytes=1 << 30) for one in seconds]


@given(COUNTS)
def test_every_card_gets_its_number_of_blocks(counts: list[int]) -> None:
    dealt = spread_evenly(counts)
    assert [dealt.count(card) for card in range(len(counts))] == counts


@given(COUNTS)
def test_of_any_first_blocks_each_card_has_its_share(counts: list[int]) -> None:
    dealt, total = spread_evenly(counts), sum(counts)
    for card, count in enumerate(counts):
        for first in range(total + 1):
            assert abs(dealt[:first].count(card) - count * first / total) < 1.0


@given(COUNTS)
def test_neighbours_share_a_card_only_where_numbers_force_it(counts: list[int]) -> None:
    forced = max(0, 2 * max(counts) - sum(counts) - 1)
    assert sum(one == other for one, other in pairwise(spread_evenly(counts))) == forced


@given(st.integers(1, 40), st.integers(1, 8), RULES)
def test_equal_cards_take_turns(blocks: int, number: int, rule: DealingRule) -> None:
    dealt = deal(blocks, cards(*[0.5] * number), rule)
    assert sorted(set(dealt)) == list(range(min(blocks, number)))
    if blocks % number == 0:
        assert dealt == tuple(range(number)) * (blocks // number)


@given(st.integers(1, 60), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_no_other_numbers_are_done_earlier(blocks: int, seconds: list[float]) -> None:
    counts = counts_of(blocks, cards(*seconds), "speed")
    done = max(n * s for n, s in zip(counts, seconds, strict=True) if n)
    for taken in range(len(counts)):
        for given_to in range(len(counts)):
            if counts[taken] > 1 and taken != given_to:
                moved = list(counts)
                moved[taken] -= 1
                moved[given_to] += 1
                assert max(n * s for n, s in zip(moved, seconds, strict=True)) >= done - 1e-9


@given(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=5), RULES)
def test_no_card_gets_more_than_it_holds(blocks: int, most: list[int], rule: DealingRule) -> None:
    if sum(most) < blocks:
        most[0] += blocks
    held = [DealtCard(block_s=1.0 + at, memory_bytes=1, most=n) for at, n in enumerate(most)]
    counts = counts_of(blocks, held, rule)
    assert sum(counts) == blocks
    assert all(count <= limit for count, limit in zip(counts, most, strict=True))


def test_one_card_computes_every_block() -> None:
    assert deal(5, cards(0.1)) == (0, 0, 0, 0, 0)


def test_a_card_half_as_fast_gets_half_as_many_blocks() -> None:
    assert counts_of(36, cards(1.0, 2.0), "auto") == (24, 12)


def test_noise_of_a_measurement_leaves_equal_cards_equal() -> None:
    assert counts_of(36, cards(1.0, 1.02), "speed") == (18, 18)


def test_without_measured_seconds_speed_is_even() -> None:
    assert counts_of(8, cards(1.0, None), "auto") == (4, 4)


def test_by_memory_a_card_of_twice_the_memory_gets_twice_the_blocks() -> None:
    both = [DealtCard(memory_bytes=48 << 30), DealtCard(memory_bytes=24 << 30)]
    assert counts_of(30, both, "memory") == (20, 10)


def test_given_numbers_are_taken_and_spread() -> None:
    assert deal(4, cards(1.0, 1.0), (3, 1)) == (0, 1, 0, 0)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((10, 20), ["deals 30 blocks", "has 28", "[14, 14]"]),
        ((28,), ["1 numbers for 2 cards"]),
    ],
)
def test_numbers_that_do_not_make_the_model_are_refused(
    numbers: tuple[int, ...], words: list[str]
) -> None:
    with pytest.raises(BadInput) as refused:
        deal(28, cards(1.0, 1.0), numbers)
    assert all(word in str(refused.value) for word in words)


@given(COUNTS)
def test_runs_are_the_whole_model_cut_where_the_card_changes(counts: list[int]) -> None:
    dealt = spread_evenly(counts)
    runs = runs_of(dealt)
    assert [at for run in runs for at in run] == list(range(len(dealt)))
    assert len(runs) == 1 + sum(one != other for one, other in pairwise(dealt))
    assert all(len({dealt[at] for at in run}) == 1 for run in runs)
