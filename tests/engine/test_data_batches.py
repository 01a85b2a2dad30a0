"""Batches: a fixed order for each seed and epoch, an exact cursor, the loss weighted by tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fluxtrain.data.batches import BatchSource, fullest_batch, in_order, typical_batch
from fluxtrain.data.packing import IGNORED, PackedRows
from fluxtrain.data.prepare import DataSource, ModelLimits, prepare
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.splitting import Spans
from fluxtrain.data.store.tokens import Tokens
from fluxtrain.errors import BadInput

LIMITS = ModelLimits(embedding_rows=320, max_positions=128)


def _rows(count: int, first_token: int = 1) -> PackedRows:
    """`count` rows of 4 tokens; the first token of each tells which one it is."""
    ids = np.arange(first_token, first_token + 4 * count, dtype=np.uint32)
    starts = np.arange(0, 4 * count + 1, 4)
    return PackedRows(Tokens(ids, starts), Spans(starts[:-1], np.diff(starts)), 4)


def _served(source: BatchSource, steps: int) -> list[int]:
    found: list[int] = []
    for _ in range(steps):
        for batch in source.next_step():
            found += batch.input_ids[:, 0].tolist()
    return found


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.mark.parametrize(("batch_rows", "accumulation"), [(1, 1), (4, 1), (2, 3), (13, 1)])
def test_every_epoch_serves_every_row_once_in_another_order(
    batch_rows: int, accumulation: int
) -> None:
    rows = _rows(13)
    source = BatchSource(rows, batch_rows, accumulation, seed=5)
    step_rows = batch_rows * accumulation
    served = _served(source, -(-3 * 13 // step_rows))
    epochs = [served[i : i + 13] for i in range(0, 39, 13)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 13
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed_alone() -> None:
    once, again = (_served(BatchSource(_rows(20), 3, seed=1), 9) for _ in range(2))
    assert once == again
    assert once != _served(BatchSource(_rows(20), 3, seed=2), 9)
    assert once[:24] == _served(BatchSource(_rows(20), 4, seed=1), 6)  # not on the batch size


@pytest.mark.parametrize("steps_before", range(8))
def test_a_cursor_continues_exactly(steps_before: int) -> None:
    source = BatchSource(_rows(7), 2, 2, seed=3)
    _served(source, steps_before)
    cursor = json.loads(json.dumps(source.state_dict()))
    expected = _served(source, 6)
    resumed = BatchSource(_rows(7), 2, 2, seed=3)
    resumed.load_state_dict(cursor)
    assert resumed.epoch == pytest.approx(4 * steps_before / 7)
    assert _served(resumed, 6) == expected


def test_a_cursor_of_other_data_or_seed_is_refused() -> None:
    cursor = BatchSource(_rows(7), 2, seed=3).state_dict()
    with pytest.raises(BadInput, match=r"other data \(7 rows, now 7\)"):
        BatchSource(_rows(7, first_token=2), 2, seed=3).load_state_dict(cursor)
    with pytest.raises(BadInput, match="seed 3 and this run has 4"):
        BatchSource(_rows(7), 2, seed=4).load_state_dict(cursor)


def test_the_batches_of_a_step_count_their_labels() -> None:
    tokens = Tokens(np.arange(1, 25, dtype=np.uint32), np.array([0, 3, 11, 13, 21, 24]))
    rows = PackedRows(tokens, Spans(tokens.starts[:-1], np.diff(tokens.starts)), 8, pack=False)
    batches = BatchSource(rows, 1, 5).next_step()
    assert sorted(batch.predicted for batch in batches) == [1, 2, 2, 7, 7]
    for batch in batches:
        assert batch.predicted == int((batch.labels != IGNORED).sum())
        assert batch.inputs()["num_items_in_batch"] == batch.predicted
        assert batch.inputs(19)["num_items_in_batch"] == 19


def test_evaluation_serves_every_row_once_in_order() -> None:
    batches = list(in_order(_rows(7), 3))
    assert [len(batch.input_ids) for batch in batches] == [3, 3, 1]
    first = torch.cat([batch.input_ids[:, 0] for batch in batches])
    assert first.tolist() == list(range(1, 29, 4))


def test_steps_per_epoch_cover_all_rows() -> None:
    assert BatchSource(_rows(12), 2, 3).steps_per_epoch == 2
    assert BatchSource(_rows(13), 2, 3).steps_per_epoch == 3


def test_a_batch_larger_than_the_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadInput, match=r"2 x 4 = 8 rows and the data has 7 of 4 tokens"):
        BatchSource(_rows(7), 2, 4)


@pytest.mark.parametrize(
    ("batch_rows", "accumulation", "cure"),
    [
        (8, 1, "lower train.batch_rows, data."),
        (1, 8, "lower train.accumulation, data."),
        (2, 4, "lower train.batch_rows, train.accumulation, data."),
    ],
)
def test_only_what_can_be_lowered_is_offered(batch_rows: int, accumulation: int, cure: str) -> None:
    with pytest.raises(BadInput) as raised:
        BatchSource(_rows(7), batch_rows, accumulation)
    assert cure in str(raised.value) and "data.held_out" in str(raised.value)


def _source(path: Path, format: str = "auto", **settings: Any) -> DataSource:
    request = read_request({"path": str(path), "format": format})
    return DataSource(request=request, **settings)


def test_a_file_becomes_rows_with_a_held_out_share(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"the fox {i} jumps"}) + "\n" for i in range(200)))
    data = prepare(
        _source(path, sequence_length=32, held_out=0.1),
        tokenizer,
        LIMITS,
    )
    assert data.documents == 200
    assert "`text`" in data.corpus.parts[0].because
    assert data.trained.token_count + data.held_out.token_count == data.tokens
    assert 0.1 <= data.held_out.token_count / data.tokens < 0.1 + 32 / data.tokens
    source = DataSource(
        request=read_request({"path": str(path), "format": "text"}),
        sequence_length=32,
        held_out=0.0,
    )
    whole = prepare(source, tokenizer, LIMITS)
    assert len(whole.held_out) == 0
    assert whole.trained.token_count == data.tokens


def test_a_file_that_takes_long_is_told_of_while_it_is_read(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 50_000)  # one line, 2.2 MB
    source, said = (
        _source(path, sequence_length=32, held_out=0.1),
        list[str](),
    )
    monkeypatch.setattr("fluxtrain.data.prepare.TELL_EVERY_S", 3600.0)
    prepare(source, tokenizer, LIMITS, said.append)
    assert len(said) == 1 and "tokenizer" in said[0]  # what is done, in case it never ends
    monkeypatch.setattr("fluxtrain.data.prepare.TELL_EVERY_S", 0.0)
    prepare(source, tokenizer, LIMITS, said.append)
    told = said[2:]
    assert told[0].startswith(f"tokens of {path}: ") and len(told) > 10
    assert said[-1] == f"tokens of {path}: 2.20 M characters, 100% of the data"


def test_data_shorter_than_a_row_is_refused_with_the_numbers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the fox")
    with pytest.raises(BadInput, match=r"holds \d+ tokens and one row needs 64: lower"):
        prepare(
            _source(path, sequence_length=64),
            tokenizer,
            LIMITS,
        )


def test_settings_that_do_not_go_with_the_model_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the fox jumps over the dog. " * 20)
    with pytest.raises(BadInput, match="sequence_length is 256 and the model knows 128 positions"):
        prepare(
            _source(path, sequence_length=256),
            tokenizer,
            LIMITS,
        )
    with pytest.raises(BadInput, match="tokenizer belongs to another model"):
        small = ModelLimits(embedding_rows=100)
        prepare(
            _source(path, sequence_length=16),
            tokenizer,
            small,
        )
    with pytest.raises(BadInput, match=r"data\.format 'csv' is not one of"):
        prepare(
            DataSource(
                request=read_request({"path": str(path), "format": "csv"}), sequence_length=16
            ),
            tokenizer,
            LIMITS,
        )


def test_a_typical_batch_is_like_those_of_training_not_like_the_first_rows() -> None:
    """Packing fills the first rows with the longest documents, so these need no mask."""
    lengths = np.asarray([8, 8, *[2] * 40])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, starts[-1] + 1, dtype=np.uint32)
    rows = PackedRows(Tokens(ids, starts), Spans(starts[:-1], lengths), 8)
    assert not next(iter(in_order(rows, 2))).mixes
    assert typical_batch(rows, 1).mixes
    assert typical_batch(rows, 2).mixes
    assert fullest_batch(rows, 2) is None
    everything = typical_batch(rows, 1000)
    assert torch.equal(everything.input_ids, next(iter(in_order(rows, len(rows)))).input_ids)


def test_batches_with_the_most_documents_are_given_where_typical_ones_hold_one_each() -> None:
    lengths = np.asarray([*[8] * 9, 4, 4])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, starts[-1] + 1, dtype=np.uint32)
    rows = PackedRows(Tokens(ids, starts), Spans(starts[:-1], lengths), 8)
    assert fullest_batch(_rows(5), 1) is None
    given = fullest_batch(rows, 1)
    assert given is not None
    assert given.mixes
    assert given.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
