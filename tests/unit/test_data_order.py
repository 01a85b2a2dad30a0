"""An order is a permutation, whatever its size, and any part of it is that of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.data import splitting
from fluxtrain.data.splitting import SORTED_MOST, Order

SEEDS = st.integers(0, 2**64 - 1)


@pytest.fixture(autouse=True, scope="module")
def _network() -> object:
    """Small orders go through the network too, as those of more than 2^18 rows do."""
    patch = pytest.MonkeyPatch()
    patch.setattr(splitting, "SORTED_MOST", 0)
    yield
    patch.undo()


@settings(max_examples=150)
@given(count=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 50))
def test_the_network_visits_every_row_once(count: int, seed: int, epoch: int) -> None:
    made = Order(count, seed, epoch)
    assert made._sorted is None
    assert sorted(made.between(0, count).tolist()) == list(range(count))


@settings(max_examples=60)
@given(count=st.integers(1, 2000), seed=SEEDS, data=st.data())
def test_a_part_of_an_order_is_that_of_the_whole(
    count: int, seed: int, data: st.DataObject
) -> None:
    whole = Order(count, seed, 3).between(0, count).tolist()
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count + 5))
    assert Order(count, seed, 3).between(first, last).tolist() == whole[first:last]


def test_an_order_of_many_rows_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    count = SORTED_MOST + 4321
    found = Order(count, 5, 0).between(0, count)
    assert (np.bincount(found, minlength=count) == 1).all()
    for other in (Order(count, 6, 0), Order(count, 5, 1)):
        assert (other.between(0, 1000) == found[:1000]).mean() < 0.01
    # neighbours are spread: the mean distance of a random permutation is a third of its length
    assert 0.3 < np.abs(np.diff(found)).mean() / count < 0.37
