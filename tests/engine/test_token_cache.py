"""Cached tokens are those of the data, whoever made them, however often their maker was killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fluxtrain.data.batches import BatchSource
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.prepare import PreparedData
from fluxtrain.data.store import shards
from fluxtrain.data.store.cache import UNUSED_S, CachedTokens, forget_unused, holds_entries
from fluxtrain.data.store.shards import Numbers
from fluxtrain.errors import BadInput
from fluxtrain.files.cache import Damaged, read_sealed
from tests.engine.cache_worker import SMALL, digest, prepared

TALK = [{"role": "user", "content": "what is two?"}, {"role": "assistant", "content": "it is four"}]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"]
WORKER = Path(__file__).with_name("cache_worker.py")


@pytest.fixture(params=["texts", "talks"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Rows of one kind, every one another."""
    path = tmp_path / f"{request.param}.jsonl"
    draw = random.Random(5)
    rows = 2000 if request.node.get_closest_marker("slow") else 700
    with path.open("w") as file:
        for number in range(rows):
            words = " ".join(
                draw.choices(
                    ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"], k=12
                )
            )
            talk = [{**TALK[0], "content": f"{words} {number}"}, TALK[1]]
            record = {"text": f"{words} {number}"} if "texts" in path.name else {"messages": talk}
            file.write(json.dumps(record) + "\n")
    return str(path)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, characters = SMALL
    monkeypatch.setattr(shards, "SHARD_TOKENS", tokens)
    monkeypatch.setattr("fluxtrain.data.encoding.encode.BATCH_CHARACTERS", characters)


def worker(data: str, cache: Path, tokenizer: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), data, str(cache), str(tokenizer)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
    )  # fmt: skip


def entry_of(cache: Path) -> Path:
    [folder] = [used.parent for used in cache.glob("*/used")]
    return folder


def batches(data: PreparedData) -> list[list[int]]:
    source = BatchSource(data.trained, 3, seed=4)
    return [batch.input_ids.ravel().tolist() for _ in range(20) for batch in source.next_step()]


def test_cached_rows_are_those_in_memory_and_a_second_start_encodes_nothing(
    data: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokenizer = str(tmp_path / "cache"), str(tokenizer_folder)
    memory, made = prepared(data, "off", tokenizer), prepared(data, cache, tokenizer)
    assert len(list((entry_of(Path(cache)) / "trained").glob("*.ids"))) > 3

    def refused(*_: object) -> None:
        raise AssertionError("the second start encodes")

    monkeypatch.setattr(Encoder, "batches", refused)
    again = prepared(data, cache, tokenizer)
    assert digest(made) == digest(again)
    assert batches(memory) == batches(made) == batches(again)
    for one in (made, again):
        assert one.trained.fit == memory.trained.fit
        assert (one.notes, one.told) == (memory.notes, memory.told)
        assert (one.tokens, one.documents) == (memory.tokens, memory.documents)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["talks"], indirect=True)
def test_a_maker_killed_at_any_moment_leaves_what_the_next_ones_complete(
    data: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    cache, draw = tmp_path / "cache", random.Random(os.path.basename(data))
    whole = prepared(data, str(tmp_path / "whole"), str(tokenizer_folder))
    kept = set[int]()
    for _ in range(2):
        maker = worker(data, cache, tokenizer_folder)
        assert maker.stdout and maker.stdout.readline().startswith("ready")
        time.sleep(draw.uniform(0.0, 0.7))
        maker.kill()
        maker.communicate()
        kept.add(len(list(cache.glob("*/trained/*.ids"))))
    both = [worker(data, cache, tokenizer_folder) for _ in range(2)]
    told = [one.communicate(timeout=120) for one in both]
    assert all(one.returncode == 0 for one in both), told
    assert {out.splitlines()[-1] for out, _ in told} == {digest(whole)}
    assert not list(cache.glob("*/*/.*"))


def test_a_maker_that_fails_within_goes_on_behind_its_last_shard(
    data: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepared(data, str(tmp_path / "whole"), str(tokenizer_folder))
    writes, write = list[str](), shards.write_numbers

    def fails(path: Path, numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> int:
        writes.append(path.name)
        if len(writes) % 8 == 7:
            raise KeyboardInterrupt
        return write(path, numbers)

    monkeypatch.setattr(shards, "write_numbers", fails)
    failed = 0
    while failed < 100:
        try:
            found = prepared(data, str(tmp_path / "cache"), str(tokenizer_folder))
            break
        except KeyboardInterrupt:
            failed += 1
    assert failed >= 2
    assert digest(found) == digest(whole)
    assert writes.count("00000.ids") == 1  # the first shard was made once


def test_other_data_and_another_template_have_entries_of_their_own(
    data: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    cache, other = tmp_path / "cache", tmp_path / "tokenizer"
    prepared(data, str(cache), str(tokenizer_folder))
    shutil.copytree(tokenizer_folder, other)
    (other / "chat_template.jinja").write_text(
        (other / "chat_template.jinja").read_text() + "{# another one #}"
    )
    prepared(data, str(cache), str(other))
    assert len(list(cache.glob("*/used"))) == 2
    with open(data, "a") as file:
        file.write(Path(data).read_text().splitlines()[0] + "\n")
    prepared(data, str(cache), str(tokenizer_folder))
    assert len(list(cache.glob("*/used"))) == 3
    forget_unused(cache, time.time() + UNUSED_S + 60)  # this process holds them all
    assert len(list(cache.glob("*/used"))) == 3
    old = cache / ("0" * 32)
    (old / "rows").mkdir(parents=True)
    (old / "used").touch()
    (old / ".complete.json.77").touch()
    forget_unused(cache, time.time() + UNUSED_S + 60)
    assert not old.exists()


@pytest.mark.parametrize("name", ["photos", "0" * 31, "0" * 33, "F" * 32, "0" * 32])
def test_a_folder_of_others_in_the_cache_is_no_entry_that_nobody_uses(
    tmp_path: Path, name: str
) -> None:
    (folder := tmp_path / name).mkdir()
    for file in ("used", "lock", "precious", ".complete.json.77"):
        (folder / file).touch()
    (tmp_path / ("1" * 32)).symlink_to(folder)
    forget_unused(tmp_path, time.time() + UNUSED_S + 60)
    assert len(os.listdir(folder)) == 4 and not holds_entries(tmp_path)


@pytest.mark.parametrize("place", ["", "used", "lock", "trained", "trained/00000.ids", "rows/x"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_or_removed_through_an_entry_that_leads_elsewhere(
    tmp_path: Path, place: str, kind: str
) -> None:
    entry = tmp_path / "cache" / ("0" * 32)
    planted = entry / place
    planted.parent.mkdir(parents=True, exist_ok=True)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / ".bashrc").touch()
    if kind == "link":
        planted.symlink_to(elsewhere)
    else:
        os.mkfifo(planted)
    with pytest.raises(BadInput, match="tokens of the data are kept there: remove it"):
        CachedTokens(entry).opened(["trained"])
    assert os.listdir(elsewhere) == [".bashrc"]


def test_only_what_a_killed_writer_left_is_removed_from_an_entry(tmp_path: Path) -> None:
    (folder := tmp_path / ("0" * 32)).mkdir()
    for name in (".00000.ids.77", ".hidden", ".precious.jpg"):
        (folder / name).touch()
    with CachedTokens(folder).building(lambda: None):
        assert sorted(os.listdir(folder)) == [".hidden", ".precious.jpg", "lock"]


def test_a_file_of_an_entry_that_is_a_pipe_is_damage_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(Damaged, match="cannot be read"):
        read_sealed(tmp_path / "x")
    with pytest.raises(Damaged, match="cannot be read"):
        Numbers(tmp_path / "x", "<u4", 1, 0)
