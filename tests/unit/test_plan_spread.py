"""Blocks on the device stand here and there between the others."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.plan.spread import spread, spread_out


@given(count=st.integers(0, 200))
def test_every_block_is_in_the_order_once_and_the_first_one_comes_first(count: int) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    assert not count or order[0] == 0


@given(count=st.integers(3, 200), share=st.floats(0, 1))
def test_two_stand_at_the_front_and_no_gap_is_longer_than_three_even_ones(
    count: int, share: float
) -> None:
    chosen_count = max(3, round(share * count))
    chosen, others = spread_out(range(count), chosen_count)
    assert len(chosen) == chosen_count
    assert sorted([*chosen, *others]) == list(range(count))
    assert chosen[:2] == [0, 1]
    gaps = [after - before for before, after in pairwise([*chosen, count])]
    assert max(gaps) <= 3 * count / (chosen_count - 1)


@given(count=st.integers(1, 200), chosen=st.integers(0, 199))
def test_one_more_leaves_the_others_where_they_are(count: int, chosen: int) -> None:
    fewer, more = (set(spread_out(range(count), n)[0]) for n in (chosen, chosen + 1))
    assert fewer <= more
    assert len(more - fewer) == (chosen < count)


@pytest.mark.parametrize(("asked", "given_"), [(0, []), (3, ["a", "b", "d"]), (9, list("abcde"))])
def test_both_parts_keep_the_order_of_the_row(asked: int, given_: list[str]) -> None:
    chosen, others = spread_out("abcde", asked)
    assert chosen == given_
    assert others == [one for one in "abcde" if one not in given_]
