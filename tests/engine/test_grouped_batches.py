"""Rows that are not packed come in groups of like lengths: each once an epoch, with a cursor."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.data import batches, splitting
from fluxtrain.data.batches import BatchSource
from fluxtrain.data.packing import PADDED_TO, PackedRows
from fluxtrain.data.splitting import whole
from fluxtrain.data.store.tokens import Tokens

LONGEST = 96


def rows_of(lengths: list[int], pack: bool = False) -> PackedRows:
    """Rows of one sample each; the first token of a sample is its number."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.ones(int(starts[-1]), dtype=np.uint32)
    ids[starts[:-1]] = np.arange(len(lengths)) + 10
    tokens = Tokens(ids, starts)
    return PackedRows(tokens, whole(tokens), LONGEST, pack=pack)


@pytest.fixture(autouse=True, scope="module", params=["sorted", "network"])
def _small(request: pytest.FixtureRequest) -> object:
    """Windows and groups of a few rows, and both ways to make an order."""
    patch = pytest.MonkeyPatch()
    patch.setattr(batches, "SORTED_TOGETHER", 16)
    patch.setattr(batches, "SERVED_TOGETHER", 4)
    if request.param == "network":
        patch.setattr(splitting, "SORTED_MOST", 0)
    yield
    patch.undo()


LENGTHS = st.lists(st.integers(2, LONGEST), min_size=1, max_size=70)


def served(source: BatchSource, steps: int) -> list[list[list[int]]]:
    return [[b.input_ids[:, 0].tolist() for b in source.next_step()] for _ in range(steps)]


@settings(max_examples=60)
@given(lengths=LENGTHS, rows=st.integers(1, 5), seed=st.integers(0, 9))
def test_every_row_is_served_once_an_epoch(lengths: list[int], rows: int, seed: int) -> None:
    packed = rows_of(lengths)
    rows = min(rows, len(packed))
    source = BatchSource(packed, rows, seed=seed)
    seen = [row for step in served(source, 3 * len(packed)) for batch in step for row in batch]
    for epoch in range(3):
        once = seen[epoch * len(packed) : (epoch + 1) * len(packed)]
        assert Counter(once) == Counter(range(10, 10 + len(packed)))


@settings(max_examples=20)
@given(lengths=LENGTHS, data=st.data())
def test_a_cursor_goes_on_with_the_same_batches(lengths: list[int], data: st.DataObject) -> None:
    packed = rows_of(lengths)
    rows = data.draw(st.integers(1, min(4, len(packed))))
    accumulation = data.draw(st.integers(1, max(1, min(3, len(packed) // rows))))
    source = BatchSource(packed, rows, accumulation, seed=3)
    served(source, data.draw(st.integers(0, 40)))
    again = BatchSource(packed, rows, accumulation, seed=3)
    again.load_state_dict(source.state_dict())
    assert again.epoch == source.epoch
    assert served(again, 20) == served(source, 20)


@settings(max_examples=40)
@given(lengths=LENGTHS)
def test_a_batch_is_as_long_as_its_longest_row(lengths: list[int]) -> None:
    packed = rows_of(lengths)
    source = BatchSource(packed, min(2, len(packed)), seed=1)
    for _ in range(10):
        [batch] = source.next_step()
        longest = max(lengths[row - 10] for row in batch.input_ids[:, 0].tolist())
        assert batch.input_ids.shape[1] == min(LONGEST, -(-longest // PADDED_TO) * PADDED_TO)
        assert batch.tokens == sum(lengths[row - 10] for row in batch.input_ids[:, 0].tolist())


def test_groups_have_like_lengths_and_less_padding() -> None:
    draw = np.random.default_rng(2)
    lengths = draw.integers(2, LONGEST, 64).tolist()
    grouped = BatchSource(rows_of(lengths), 4, seed=2)
    spread = []
    for _ in range(16):
        [batch] = grouped.next_step()
        own = [lengths[row - 10] for row in batch.input_ids[:, 0].tolist()]
        spread.append(max(own) - min(own))
    assert np.mean(spread) < 30  # of 94: four of sixteen rows in their order are next to each other
