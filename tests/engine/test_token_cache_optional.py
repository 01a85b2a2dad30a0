"""A cache that nobody named never ends a run: tokens are held in memory, and it is told."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from fluxtrain.data import prepare as preparing
from fluxtrain.data.prepare import DataSource, ModelLimits, PreparedData, prepare
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.store.cache import NotKept
from fluxtrain.errors import BadInput, NoSpace, ReadFailed
from tests.engine.small_caches import byte_level, keep_small, texts


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(preparing, "CACHED_FROM_BYTES", 0)
    keep_small(monkeypatch)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return texts(tmp_path)


@contextmanager
def small_files() -> Iterator[None]:
    """Let no file have more than 3000 bytes, which a shard has."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def prepared(data: Path, cache: str, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    source = DataSource(
        request=read_request({"path": str(data)}), sequence_length=64, held_out=0.1,
        token_cache=cache,
    )  # fmt: skip
    return prepare(source, tokenizer, ModelLimits(embedding_rows=600))


def digest(found: PreparedData) -> str:
    for rows in (found.trained, found.held_out):
        rows.take(np.arange(len(rows)))
    return f"{found.trained.fingerprint()} {found.held_out.fingerprint()}"


def told_of_cache(found: PreparedData) -> str:
    [told] = [line for line in found.told if "the next start makes the tokens again" in line]
    return told


def test_a_full_cache_of_the_user_is_told_and_gives_its_room_back(
    data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    expected = digest(prepared(data, "off", tokenizer))
    with small_files():
        found = prepared(data, "auto", tokenizer)
    assert digest(found) == expected
    folder = tmp_path / "cache" / "fluxtrain" / "tokens"
    told = told_of_cache(found)
    assert f"no space left for the tokens of the data in {folder} (File too large; " in told
    assert " free): make room, or name another folder in data.token_cache" in told
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_is_only_read_is_told_and_the_run_goes_on(
    number: int, data: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    expected = digest(prepared(data, "off", tokenizer))
    monkeypatch.setattr("fluxtrain.data.store.cache.open_to_write", refuses)
    found = prepared(data, "auto", tokenizer)
    assert digest(found) == expected
    assert f"({os.strerror(number)}): name another folder" in told_of_cache(found)


def test_a_named_cache_and_data_too_large_for_memory_are_refused(
    data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_files(), pytest.raises(NoSpace, match="no space left for the tokens"):
        prepared(data, str(tmp_path / "named"), tokenizer)
    monkeypatch.setattr(preparing, "HELD_UP_TO_BYTES", 1000)
    with small_files(), pytest.raises(NoSpace, match="left for the tokens") as refused:
        prepared(data, "auto", tokenizer)
    assert isinstance(refused.value, NotKept) and refused.value.exit_code == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be kept") as closed:
        prepared(data, str(tmp_path / "file"), tokenizer)
    assert closed.value.exit_code == 2


def test_a_disk_of_the_data_that_fails_is_not_told_as_one_of_the_cache(
    data: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise ReadFailed("the data could not be read")

    monkeypatch.setattr(preparing, "_build", fails)
    with pytest.raises(ReadFailed, match="the data could not be read"):
        prepared(data, "auto", tokenizer)
