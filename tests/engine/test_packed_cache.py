"""The cache of packed models: killed, damaged, without room, and written by two at once."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.core.quantization import packed_cache
from fluxtrain.core.quantization.packed_cache import PackedCache, cache_key
from fluxtrain.errors import NoSpace
from tests.engine import forked

SIZES = {"blocks.0": 70_001, "blocks.1": 3, "blocks.2": 4096, "head": 200_000}
KEY = "0123456789abcdef"


def packed(name: str) -> Tensor:
    """The bytes of a group, always the same."""
    seed = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(0, 256, (SIZES[name],), generator=seed, dtype=torch.uint8)


def start(folder: Path, says: list[str] | None = None) -> list[str]:
    """One start of a run: returns the groups that had to be packed; all hold the right bytes."""
    said, made = [] if says is None else says, []
    with PackedCache(KEY, SIZES, said.append, folder) as cache:
        for name, size in SIZES.items():
            out = torch.zeros(size, dtype=torch.uint8)
            if not cache.read_into(name, out):
                out = packed(name)
                cache.add(name, out)
                made.append(name)
            assert torch.equal(out, packed(name))
    return made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "PIECE_BYTES", 10_000)


def file_of(folder: Path, name: str) -> Path:
    return folder / KEY / f"{list(SIZES).index(name)}.packed"


def test_a_second_start_packs_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert start(tmp_path, said) == list(SIZES)
    assert start(tmp_path, said) == []
    assert said == []
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {
        file_of(tmp_path, name) for name in SIZES
    }


@pytest.mark.parametrize("damage", ["bit", "cut", "checksum", "empty", "other group"])
def test_a_damaged_group_is_found_and_made_anew(tmp_path: Path, damage: str) -> None:
    start(tmp_path)
    path = file_of(tmp_path, "head")
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 4
    elif damage == "cut":
        del data[-5000:]
    elif damage == "checksum":
        data[5] ^= 1
    elif damage == "empty":
        data.clear()
    else:
        data[:] = file_of(tmp_path, "blocks.0").read_bytes()
    path.write_bytes(data)
    said: list[str] = []
    assert start(tmp_path, said) == ["head"]
    assert len(said) == 1 and "head" in said[0] and "damaged" in said[0]
    assert start(tmp_path, said) == []
    assert len(said) == 1


def test_what_was_written_before_an_error_is_read_by_the_next_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        PackedCache(KEY, SIZES, pytest.fail, tmp_path) as cache,
    ):
        cache.add("blocks.0", packed("blocks.0"))
        while not file_of(tmp_path, "blocks.0").exists():
            time.sleep(0.001)
        raise RuntimeError
    assert start(tmp_path) == ["blocks.1", "blocks.2", "head"]
    assert start(tmp_path) == []


def child(folder: Path, begin: Connection) -> None:
    """Say that this process is ready, wait for a word, and start once."""
    packed_cache.PIECE_BYTES = 10_000
    begin.send("ready")
    begin.recv()
    start(folder)


@contextlib.contextmanager
def ready(folder: Path) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """A process that starts once it is told to, and who tells it."""
    ours, theirs = Pipe()
    with forked.running(child, folder, theirs) as process:
        assert ours.recv() == "ready"
        yield process, ours


def test_killed_at_any_moment_what_is_there_is_whole(tmp_path: Path) -> None:
    chance = random.Random(3)
    for _ in range(3):
        with ready(tmp_path) as (process, begin):
            begin.send("go")
            time.sleep(chance.random() * 0.03)
            process.kill()
    said: list[str] = []
    start(tmp_path, said)
    assert start(tmp_path, said) == said == []


@pytest.mark.slow
def test_starts_at_once_have_the_same_bytes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        every = [opened.enter_context(ready(tmp_path)) for _ in range(3)]
        for _, begin in every:
            begin.send("go")
        for process, _ in every:
            process.join(60)
            assert process.exitcode == 0
    assert start(tmp_path) == []


@pytest.mark.parametrize("limit_bytes", [5_000, 100_000])
def test_without_room_the_run_goes_on_and_leaves_nothing(tmp_path: Path, limit_bytes: int) -> None:
    """A limit of a process for its files refuses in the middle of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said: list[str] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        assert start(tmp_path, said) == list(SIZES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(said) == 1 and "File too large" in said[0] and "packs again" in said[0]
    assert list(tmp_path.iterdir()) == []
    assert start(tmp_path) == list(SIZES)
    assert start(tmp_path) == []


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "free_bytes", lambda _: 2 << 20)
    said: list[str] = []
    assert start(tmp_path, said) == list(SIZES)
    assert len(said) == 1 and "0.0 GiB free" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_what_must_live_there_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    monkeypatch.setattr(packed_cache, "free_bytes", lambda _: 2 << 20)
    PackedCache(KEY, SIZES, pytest.fail, tmp_path, homes=list(SIZES))  # they are there already
    with pytest.raises(NoSpace, match=r"must live on disk.*0\.0 GiB free.*XDG_CACHE_HOME"):
        PackedCache("other", SIZES, pytest.fail, tmp_path, homes=["head"])
    assert [path.name for path in tmp_path.iterdir()] == [KEY]


def test_what_a_killed_start_was_writing_is_removed_after_an_hour(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    for name, age_s in (("old", 2 * 3600), ("new", 60)):
        path = tmp_path / KEY / f".{name}.1.tmp"
        path.write_text("x")
        os.utime(path, (time.time() - age_s,) * 2)
    start(tmp_path)
    assert [path.name for path in (tmp_path / KEY).glob(".*")] == [".new.1.tmp"]


PARAMETERS = [("a", (4, 4), torch.bfloat16), ("b", (2, 8), torch.bfloat16)]


def shard(path: Path, value: float = 1.0) -> Path:
    save_file({"a": torch.full((4, 4), value)}, path)
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_the_key_changes_with_whatever_changes_packed_bytes(tmp_path: Path) -> None:
    path = shard(tmp_path / "model.safetensors")
    key = cache_key("nf4", [path], PARAMETERS)
    assert key == cache_key("nf4", [path], PARAMETERS)
    others = [
        cache_key("int8", [path], PARAMETERS),
        cache_key("nf4", [path], PARAMETERS[::-1]),
        cache_key("nf4", [path], [("a", (4, 4), torch.float32), PARAMETERS[1]]),
        cache_key("nf4", [path], [("a", (2, 8), torch.bfloat16), PARAMETERS[1]]),
        cache_key("nf4", [path], PARAMETERS, ["pissa"]),
        cache_key("nf4", [path, shard(tmp_path / "second.safetensors")], PARAMETERS),
    ]
    os.utime(path, ns=(10**18 + 1, 10**18 + 1))
    others.append(cache_key("nf4", [path], PARAMETERS))
    save_file({"b": torch.full((4, 4), 1.0)}, path)
    os.utime(path, ns=(10**18, 10**18))
    others.append(cache_key("nf4", [path], PARAMETERS))
    assert len({key, *others}) == len(others) + 1


def test_a_file_of_the_hubs_cache_is_known_by_its_blob(tmp_path: Path) -> None:
    """Its snapshot may be downloaded again at any time, and by another revision's name."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = shard(blobs / "5f0c")
    link = snapshot / "model.safetensors"
    link.symlink_to(blob)
    key = cache_key("nf4", [link], PARAMETERS)
    os.utime(blob, ns=(5, 5))
    assert cache_key("nf4", [link], PARAMETERS) == key
    link.unlink()
    link.symlink_to(shard(blobs / "77aa"))
    assert cache_key("nf4", [link], PARAMETERS) != key
