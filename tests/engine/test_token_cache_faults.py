"""A cache that is damaged, foreign, only read or full: never other tokens, and the cure."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from fluxtrain.data import prepare as preparing
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.prepare import DataSource, ModelLimits, PreparedData, prepare
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.store import cache
from fluxtrain.data.store.cache import NotKept
from fluxtrain.errors import BadInput, NoSpace, ReadFailed
from tests.engine.small_caches import byte_level, keep_small, texts


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_small(monkeypatch)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return texts(tmp_path)


@pytest.fixture
def _users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that nobody named; it never ends a run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(preparing, "CACHED_FROM_BYTES", 0)


@contextmanager
def small_files() -> Iterator[None]:
    """Let no file have more than 3000 bytes, which a shard has."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def prepared(data: Path, folder: object, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    source = DataSource(
        request=read_request({"path": str(data)}), sequence_length=64, held_out=0.1,
        token_cache=str(folder),
    )  # fmt: skip
    return prepare(source, tokenizer, ModelLimits(embedding_rows=600))


def digest(found: PreparedData) -> str:
    for rows in (found.trained, found.held_out):
        rows.take(np.arange(len(rows)))
    return f"{found.trained.fingerprint()} {found.held_out.fingerprint()}"


def harmed(content: bytes, how: str, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return {
        "cut": content[:at],
        "flipped": content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
        "noise": draw.randbytes(len(content)),
    }[how]


@pytest.mark.parametrize("how", ["cut", "flipped", "noise", "missing"])
def test_a_harmed_file_never_gives_other_tokens(
    how: str, data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    folder, draw = tmp_path / "cache", random.Random(how)
    expected = digest(prepared(data, folder, tokenizer))
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.stat().st_size]
    for name in (one for one in names if (whole / one).is_file()):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        path = folder / name
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(harmed(path.read_bytes(), how, draw))
        found = digest(prepared(data, folder, tokenizer))
        assert found == expected, name


def test_a_cache_that_is_only_read_serves_what_it_has(
    data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(prepared(data, tmp_path / "cache", tokenizer))
    opened = os.open

    def read_only(path: object, flags: int, *mode: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *mode)  # type: ignore[arg-type]

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.os, "open", read_only)
    monkeypatch.setattr(cache.os, "utime", refused)
    monkeypatch.setattr("fluxtrain.data.store.shards.replace_file", refused)
    monkeypatch.setattr(Encoder, "batches", refused)
    assert digest(prepared(data, tmp_path / "cache", tokenizer)) == expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"Read-only file system\): name another folder in data.tok"):
        prepared(data, tmp_path / "empty", tokenizer)


def test_a_folder_that_cannot_be_is_refused(data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for folder in (data, data / "within", "/proc/none"):
        with pytest.raises(BadInput, match="cannot be kept in .*: name another folder"):
            prepared(data, folder, tokenizer)


def test_a_full_disk_is_said_and_what_is_whole_is_used_later(
    data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with small_files(), pytest.raises(NoSpace, match="no space left for the tokens .* set it to"):
        prepared(data, tmp_path / "cache", tokenizer)
    expected = digest(prepared(data, tmp_path / "whole", tokenizer))
    assert digest(prepared(data, tmp_path / "cache", tokenizer)) == expected


def test_an_entry_that_is_removed_meanwhile_is_made_again(
    data: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(prepared(data, tmp_path / "whole", tokenizer))
    folder, removed = tmp_path / "cache", list[Path]()

    def removes(of: Path) -> None:
        if not removed:
            removed.extend(of.iterdir())
            shutil.rmtree(of)

    monkeypatch.setattr("fluxtrain.data.prepare.forget_unused", removes)
    assert digest(prepared(data, folder, tokenizer)) == expected
    assert removed


# -- a cache that nobody named ---------------------------------------------------------------------


def told_of_cache(found: PreparedData) -> str:
    [told] = [line for line in found.told if "the next start makes the tokens again" in line]
    return told


@pytest.mark.usefixtures("_users_cache")
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


@pytest.mark.usefixtures("_users_cache")
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


@pytest.mark.usefixtures("_users_cache")
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


@pytest.mark.usefixtures("_users_cache")
def test_a_disk_of_the_data_that_fails_is_not_told_as_one_of_the_cache(
    data: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise ReadFailed("the data could not be read")

    monkeypatch.setattr(preparing, "_build", fails)
    with pytest.raises(ReadFailed, match="the data could not be read"):
        prepared(data, "auto", tokenizer)
