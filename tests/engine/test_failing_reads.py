"""A disk that fails or gives no answer: reads are done again, then the run ends with its code."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fluxtrain.config.schema import load_config
from fluxtrain.data.store.shards import Numbers, write_numbers
from fluxtrain.errors import ReadFailed
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files import opening
from fluxtrain.files.opening import read_again
from fluxtrain.train.checkpoint import checkpoint as checkpoints
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.checkpoint.recovery import Target
from fluxtrain.train.run import train
from tests.engine.test_foreign_checkpoints import NEWEST, resumed, two_checkpoints

MakeConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PAUSES_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(opening, "STUCK_S", 0.1)


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[int]:
    """Let reads of ranges end with EIO; they are counted."""
    real, reads = os.preadv, list[int]()

    def preadv(*arguments: Any) -> int:
        reads.append(len(reads))
        if fails(len(reads)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    return reads


def reopened(path: Path) -> Numbers:
    return Numbers(path, "<u4", 100_000, zlib.crc32(path.read_bytes()))


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    write_numbers(path, np.arange(100_000, dtype="<u4"))
    return path


def test_a_read_that_fails_for_a_while_gives_the_same_numbers(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = reopened(numbers)
    reads = failing(monkeypatch, lambda count: count % 3 != 0)
    assert np.array_equal(opened.read(70_000, 20_000), np.arange(70_000, 90_000))
    assert len(reads) == 3


def test_a_read_that_always_fails_is_told_with_its_file_and_code_8(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = reopened(numbers)
    failing(monkeypatch, lambda _: True)
    with pytest.raises(ReadFailed, match=r"numbers cannot be read \(Input/output.*4 attempts"):
        opened.read(0, 5)
    assert ReadFailed("why").exit_code == 8


def test_a_read_that_gives_no_answer_is_done_again_beside_the_stuck_one(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, free, real = reopened(numbers), threading.Event(), os.preadv
    stuck: list[int] = []

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        if len(stuck) < 2:
            stuck.append(descriptor)
            free.wait(30)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert np.array_equal(opened.read(7, 3), [7, 8, 9])
    assert len(stuck) == 2
    with pytest.raises(ReadFailed, match="no answer in 0.1 s"):
        read_again(lambda: time.sleep(1.0), numbers, 0.1)
    free.set()


@pytest.mark.parametrize("lasts", [2, 99])
def test_a_checkpoint_that_cannot_be_read_is_tried_again_before_the_one_before_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts: int
) -> None:
    two_checkpoints(tmp_path)
    real, failed = checkpoints.hash_file, []

    def hash_file(path: Path) -> Any:
        if path.parent.name == NEWEST and len(failed) < lasts:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(checkpoints, "hash_file", hash_file)
    step, _, warnings = resumed(tmp_path)
    assert step == (10 if lasts == 2 else 5)
    assert any("cannot be read" in text for text in warnings) is (lasts == 99)


def test_a_run_whose_data_cannot_be_read_any_more_ends_with_8_and_its_last_checkpoint(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        train__steps=40, train__checkpoint_every=2, data__token_cache=str(tmp_path / "cache")
    )
    target = Target(run_dir=RunDir(tmp_path / "run"), resumes=False)
    failing(
        monkeypatch, lambda _: bool(list_checkpoints(tmp_path / "run" / "checkpoints"))
    )  # from then on
    with pytest.raises(ReadFailed) as ended:
        train(load_config(config), target)
    told = str(ended.value)
    assert "Input/output error" in told and "stands: fluxtrain train --resume" in told
    assert json.loads((tmp_path / "run" / "error.json").read_text())["exit_code"] == 8
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        read_checkpoint(path)
    monkeypatch.undo()
    target = Target(run_dir=RunDir(tmp_path / "run"), resumes=True)
    train(load_config(config), target)
