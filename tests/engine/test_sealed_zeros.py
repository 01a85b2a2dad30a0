"""Kept tokens that are zeros, or others, under right checksums: refused in words, or made anew."""

from __future__ import annotations

import io
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.prepare import DataSource, ModelLimits, PreparedData, prepare
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.store import shards
from fluxtrain.data.store.shard_files import (
    Damaged,
    Numbers,
    read_json,
    write_json,
    write_numbers,
)
from tests.engine.small_caches import byte_level, keep_small

Spoil = Callable[["np.ndarray[tuple[int], np.dtype[np.generic]]"], None]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_small(monkeypatch, 1024)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    talks = (
        [{"role": "user", "content": f"mill {at}"}, {"role": "assistant", "content": f"river {at}"}]
        for at in range(300)
    )
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def prepared(data: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    source = DataSource(
        request=read_request({"path": str(data)}), sequence_length=64, held_out=0.1,
        token_cache=str(folder),
    )  # fmt: skip
    return prepare(source, tokenizer, ModelLimits(embedding_rows=600))


def rows_of(found: PreparedData) -> list[bytes]:
    """Return what is trained on, as bytes: every token and every label."""
    every = [rows.take(np.arange(len(rows))) for rows in (found.trained, found.held_out)]
    return [array.tobytes() for rows in every for array in (rows.input_ids, rows.labels)]


def spoilt(entry: Path, kind: str, spoil: Spoil) -> None:
    """Change the numbers of the second shard, and seal it again."""
    part = entry / "trained"
    manifest = read_json(part / "manifest.json")
    dtype = {"ids": manifest["dtype"], "marks": np.bool_, "index": shards._INDEX}[kind]
    numbers = Numbers(part / f"00001.{kind}", dtype).whole().copy()
    spoil(numbers)
    manifest["shards"][1]["guards"][kind] = write_numbers(part / f"00001.{kind}", numbers)
    write_json(part / "manifest.json", manifest)


def zeros(numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> None:
    numbers[:] = np.zeros(1, dtype=numbers.dtype)


def hole(numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> None:
    numbers[100:140] = np.zeros(1, dtype=numbers.dtype)


@pytest.mark.parametrize("with_packing", [True, False], ids=["packing kept", "packing gone"])
@pytest.mark.parametrize(
    ("kind", "spoil"), [("ids", zeros), ("ids", hole), ("marks", zeros), ("index", zeros)]
)
def test_zeros_under_right_checksums_are_never_trained_on(
    kind: str, spoil: Spoil, with_packing: bool, data: Path, tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    folder = tmp_path / "cache"
    expected = rows_of(prepared(data, folder, tokenizer))
    [entry] = folder.iterdir()
    spoilt(entry, kind, spoil)
    if not with_packing:
        shutil.rmtree(entry / "rows")
    if kind != "index":  # which is read whole at the start
        words = {"ids": "other tokens than those of", "marks": "no token to learn of"}[kind]
        with pytest.raises(Damaged, match=rf"holds {words} {data} line \d+: .* start again"):
            rows_of(prepared(data, folder, tokenizer))
    assert rows_of(prepared(data, folder, tokenizer)) == expected


@pytest.mark.parametrize("name", ["starts", "lengths", "first_piece"])
def test_a_packing_of_zeros_under_a_right_checksum_is_made_anew(
    name: str, data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "cache"
    expected = rows_of(prepared(data, folder, tokenizer))
    [rows] = folder.glob("*/rows")
    for path in rows.iterdir():
        with np.load(io.BytesIO(path.read_bytes()[4:])) as found:
            arrays = {one: found[one] for one in found.files}
        arrays[name] = np.zeros_like(arrays[name])
        made = io.BytesIO()
        np.savez(made, **arrays)
        guard = zlib.crc32(made.getvalue()).to_bytes(4, "little")
        path.write_bytes(guard + made.getvalue())
    assert rows_of(prepared(data, folder, tokenizer)) == expected


def test_sound_tokens_are_taken_and_each_sample_is_compared_once(
    data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_of(prepared(data, tmp_path / "cache", tokenizer))
    counted: list[int] = []
    key_of = shards.content_key
    monkeypatch.setattr(shards, "content_key", lambda ids: counted.append(len(ids)) or key_of(ids))
    monkeypatch.setattr(Encoder, "batches", None)  # nothing is encoded again
    found = prepared(data, tmp_path / "cache", tokenizer)
    assert rows_of(found) == expected == rows_of(found)
    assert len(counted) == 300


def test_a_text_of_one_token_again_and_again_is_sound(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    [zero] = {tokenizer.decode([0])}
    path = tmp_path / "zeros.jsonl"
    path.write_text("".join(json.dumps({"text": zero * 200}) + "\n" for _ in range(40)))
    found = prepared(path, tmp_path / "cache", tokenizer)
    assert rows_of(found) == rows_of(prepared(path, tmp_path / "cache", tokenizer))
