"""Splitting and packing: no token lost, none in both parts, no label across a document's border."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluxtrain.data.encoding.encode import check_vocabulary
from fluxtrain.data.packing import IGNORED, PackedRows
from fluxtrain.data.splitting import Spans, split
from fluxtrain.data.store.tokens import Tokens
from fluxtrain.errors import BadInput

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def _tokens(lengths: list[int], trained: list[bool] | None = None) -> Tokens:
    """Documents of these lengths whose tokens are 1, 2, 3, ..., so each one can be told."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(1, starts[-1] + 1, dtype=np.uint32)
    return Tokens(ids, starts, None if trained is None else np.asarray(trained))


def _whole(tokens: Tokens) -> Spans:
    return Spans(tokens.starts[:-1], np.diff(tokens.starts))


def _document_of(tokens: Tokens, token: int) -> int:
    return int(np.searchsorted(tokens.starts, token - 1, side="right")) - 1


def _held(spans: Spans) -> list[int]:
    pairs = zip(spans.starts, spans.lengths, strict=True)
    return [int(place) for start, length in pairs for place in range(start, start + length)]


@given(lengths=LENGTHS, row_tokens=st.integers(2, 32), pack=st.booleans())
def test_every_token_that_can_be_trained_is_in_exactly_one_row(
    lengths: list[int], row_tokens: int, pack: bool
) -> None:
    tokens = _tokens(lengths)
    rows = PackedRows(tokens, _whole(tokens), row_tokens, pack=pack)
    seen = [row.input_ids[row.document_ids >= 0] for row in (rows[i] for i in range(len(rows)))]
    found = np.sort(np.concatenate(seen)) if seen else np.array([])
    pieces = [
        (start, min(row_tokens, end - start))
        for first, end in zip(tokens.starts, tokens.starts[1:], strict=False)
        for start in range(int(first), int(end), row_tokens)
    ]
    expected = [
        start + i + 1 for start, length in pieces if length > 1 for i in range(length)
    ]  # a rest of one token predicts nothing
    assert found.tolist() == expected
    assert rows.token_count == len(expected)


@given(lengths=LENGTHS, row_tokens=st.integers(2, 32), pack=st.booleans())
def test_a_label_is_the_next_token_of_the_same_document(
    lengths: list[int], row_tokens: int, pack: bool
) -> None:
    tokens = _tokens(lengths)
    rows = PackedRows(tokens, _whole(tokens), row_tokens, pack=pack)
    predicted = 0
    for index in range(len(rows)):
        row = rows[index]
        for place in range(row_tokens):
            label = int(row.labels[0, place])
            if label == IGNORED:
                continue
            predicted += 1
            before = int(row.input_ids[0, place - 1])
            assert place > 0
            assert label == row.input_ids[0, place] == before + 1
            assert _document_of(tokens, label) == _document_of(tokens, before)
            assert row.document_ids[0, place - 1] == row.document_ids[0, place]
        assert row.predicted > 0
    assert predicted == rows.predicted_count


@given(lengths=LENGTHS, row_tokens=st.integers(2, 32))
def test_positions_restart_at_0_exactly_where_a_document_begins(
    lengths: list[int], row_tokens: int
) -> None:
    tokens = _tokens(lengths)
    rows = PackedRows(tokens, _whole(tokens), row_tokens)
    for index in range(len(rows)):
        row = rows[index]
        documents, positions = row.document_ids[0], row.position_ids[0]
        begins = np.diff(documents, prepend=-1) > 0
        assert begins.tolist() == (positions == 0).tolist()
        assert (np.diff(positions)[~begins[1:]] == 1).all()  # padding counts on
        assert positions.max() < row_tokens


@given(lengths=LENGTHS, row_tokens=st.integers(2, 32))
def test_packing_leaves_at_most_one_row_half_empty(lengths: list[int], row_tokens: int) -> None:
    tokens = _tokens(lengths)
    rows = PackedRows(tokens, _whole(tokens), row_tokens)
    filled = [rows[i].tokens for i in range(len(rows))]
    assert sum(2 * count <= row_tokens for count in filled) <= 1


@given(
    marks=st.lists(st.booleans(), min_size=1, max_size=200),
    lengths=LENGTHS,
    row_tokens=st.integers(2, 32),
)
def test_only_marked_tokens_are_trained_and_no_row_has_nothing_to_learn(
    marks: list[bool], lengths: list[int], row_tokens: int
) -> None:
    trained = [marks[i % len(marks)] for i in range(sum(lengths))]
    tokens = _tokens(lengths, trained)
    rows = PackedRows(tokens, _whole(tokens), row_tokens)
    found = set()
    for index in range(len(rows)):
        labels = rows[index].labels
        assert (labels != IGNORED).any()
        found |= set(labels[labels != IGNORED].tolist())
    expected = set[int]()
    for first, end in zip(tokens.starts.tolist(), tokens.starts[1:].tolist(), strict=False):
        is_text = all(trained[first + 1 : end])  # such a one is cut into pieces
        for start in range(first, end, row_tokens) if is_text else [first]:
            piece = range(start + 1, min(start + row_tokens, end))
            expected |= {place + 1 for place in piece if trained[place]}
    assert found == expected
    assert len(found) == rows.predicted_count
    assert rows.fit.lost == sum(
        sum(trained[first + 1 : end]) - len([x for x in found if first < x <= end])
        for first, end in zip(tokens.starts.tolist(), tokens.starts[1:].tolist(), strict=False)
        if not all(trained[first + 1 : end])
    )


def test_what_does_not_fit_is_counted_and_an_answer_without_its_question_is_left_out() -> None:
    marks = [[0, 0, 0, 1, 1], [0] * 9 + [1] * 3, [0, 0, 0, 1] + [0] * 6 + [1, 1]]
    tokens = _tokens([len(one) for one in marks], [bool(x) for one in marks for x in one])
    rows = PackedRows(tokens, _whole(tokens), 8)
    fit = rows.fit
    assert (fit.samples, fit.longer, fit.cut, fit.left_out) == (3, 2, 1, 1)
    assert fit.lost == 5
    assert fit.first_left_out == "sample 2"
    labels = np.concatenate([rows[i].labels.ravel() for i in range(len(rows))])
    assert sorted(labels[labels != IGNORED].tolist()) == [4, 5, 21]
    cut, left_out = fit.sentences()
    assert "1 sample of 3 longer than a row of 8 tokens is cut" in cut
    assert "left out" in left_out and "first: sample 2" in left_out
    texts = _tokens([5, 30])
    assert "1 of 2 texts are longer" in PackedRows(texts, _whole(texts), 8).fit.sentences()[0]


def test_of_conversations_whole_ones_are_held_out_with_all_their_samples() -> None:
    tokens = _tokens([9, 7, 8, 9, 7, 12], [False, True, True] * 17 + [True])
    tokens = replace(tokens, row_numbers=np.array([0, 0, 1, 2, 2, 3]))
    for seed in range(6):
        parts = split(tokens, 0.3, 4, seed)
        for spans in (parts.trained, parts.held_out):
            assert set(spans.starts.tolist()) <= set(tokens.starts.tolist())
        held = set(np.searchsorted(tokens.starts, parts.held_out.starts).tolist())
        assert held and len(held & {0, 1}) != 1 and len(held & {3, 4}) != 1
    single = replace(_tokens([50], [False, True] * 25), row_numbers=np.array([0]))
    assert not len(split(single, 0.3, 4, 0).held_out.starts)


def test_a_batch_of_rows_equals_the_rows_one_by_one() -> None:
    tokens = _tokens([5, 9, 3, 30, 2, 2])
    rows = PackedRows(tokens, _whole(tokens), 8, pad_id=77)
    order = np.array([2, 0, 1])
    batch = rows.take(order)
    for place, index in enumerate(order):
        single = rows[int(index)]
        for name in ("input_ids", "labels", "position_ids", "document_ids"):
            assert (getattr(batch, name)[place] == getattr(single, name)[0]).all()
    assert (rows[len(rows) - 1].input_ids[rows[len(rows) - 1].document_ids < 0] == 77).all()


def test_rows_beyond_the_last_and_rows_too_short_are_refused() -> None:
    tokens = _tokens([5, 9])
    rows = PackedRows(tokens, _whole(tokens), 8)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]
    with pytest.raises(BadInput, match="2 tokens at least"):
        PackedRows(tokens, _whole(tokens), 1)


def test_the_fingerprint_tells_other_tokens_and_other_places() -> None:
    tokens = _tokens([5, 9])
    same = PackedRows(_tokens([5, 9]), _whole(tokens), 8).fingerprint()
    assert PackedRows(tokens, _whole(tokens), 8).fingerprint() == same
    moved = _tokens([6, 8])
    assert PackedRows(moved, _whole(moved), 8).fingerprint() != same
    assert PackedRows(tokens, _whole(tokens), 9).fingerprint() != same
    tokens.ids[3] += 1
    assert PackedRows(tokens, _whole(tokens), 8).fingerprint() != same


@example(lengths=[1, 1], share=0.75, row_tokens=2, seed=0)  # rounds up to all of it
@given(
    lengths=LENGTHS, share=st.floats(0.0, 0.9), row_tokens=st.integers(2, 16), seed=st.integers()
)
def test_a_split_loses_no_token_and_shares_none(
    lengths: list[int], share: float, row_tokens: int, seed: int
) -> None:
    tokens = _tokens(lengths)
    parts = split(tokens, share, row_tokens, seed % 2**63)
    held, trained = _held(parts.held_out), _held(parts.trained)
    assert sorted(held + trained) == list(range(tokens.count))
    if share == 0.0:
        assert held == []
    elif tokens.count > 1 and len(lengths) > 1:
        assert held
        assert trained
        assert min(row_tokens, tokens.count // 2, share * tokens.count) - 1 <= len(held)


@given(lengths=LENGTHS.filter(lambda found: len(found) > 4), order=st.randoms())
def test_a_document_stays_on_its_side_when_the_file_is_reordered(
    lengths: list[int], order: object
) -> None:
    tokens = _tokens(lengths)
    documents = [tokens.ids[a:b] for a, b in zip(tokens.starts, tokens.starts[1:], strict=False)]
    order.shuffle(documents)  # type: ignore[attr-defined]
    starts = np.cumsum([0, *(len(document) for document in documents)])
    shuffled = Tokens(np.concatenate(documents), starts.astype(np.int64))
    once = {int(tokens.ids[i]) for i in _held(split(tokens, 0.3, 4, 1).held_out)}
    again = {int(shuffled.ids[i]) for i in _held(split(shuffled, 0.3, 4, 1).held_out)}
    assert once == again


def test_another_seed_holds_out_other_documents() -> None:
    tokens = _tokens([7] * 200)
    held = {tuple(_held(split(tokens, 0.1, 16, seed).held_out)) for seed in range(4)}
    assert len(held) == 4


def test_of_a_single_document_its_end_is_held_out() -> None:
    tokens = _tokens([1000])
    parts = split(tokens, 0.05, 16, 0)
    assert _held(parts.held_out) == list(range(950, 1000))


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match=r"data\.held_out"):
        split(_tokens([5, 5]), share, 4, 0)


def test_a_token_beyond_the_embedding_is_refused_with_both_numbers() -> None:
    check_vocabulary(31, 32)
    with pytest.raises(BadInput, match="token 32 and the model's embedding has 32 rows"):
        check_vocabulary(32, 32)


def test_the_rows_with_the_most_documents_are_found() -> None:
    tokens = _tokens([8, 3, 3, 2, 5, 3, 8])
    rows = PackedRows(tokens, _whole(tokens), 8)
    documents = [int(rows[index].document_ids.max()) + 1 for index in range(len(rows))]
    assert sorted(documents) == [1, 1, 2, 3]
    assert [documents[index] for index in rows.fullest(2)] == [3, 2]
    assert sorted(rows.fullest(9)) == [0, 1, 2, 3]
    assert rows.mixes
    assert not PackedRows(tokens, _whole(tokens), 8, pack=False).mixes
