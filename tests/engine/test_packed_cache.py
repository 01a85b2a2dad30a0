"""The cache of packed models: killed, damaged, without room, and written by two at once."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.core.quantization import cache_file, packed_cache
from fluxtrain.core.quantization.packed_cache import PackedCache, cache_folder, cache_key

SIZES = {"blocks.0": 70_001, "blocks.1": 3, "blocks.2": 4096, "head": 200_000}
KEY = "0123456789abcdef"


def packed(name: str) -> Tensor:
    """The bytes of a group, always the same."""
    seed = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(0, 256, (SIZES[name],), generator=seed, dtype=torch.uint8)


def start(folder: Path, says: list[str] | None = None) -> list[str]:
    """One start of a run: returns the groups that had to be packed; all hold the right bytes."""
    said, made = [] if says is None else says, []
    with PackedCache.open(KEY, SIZES, said.append, folder) as cache:
        for name, size in SIZES.items():
            out = torch.zeros(size, dtype=torch.uint8)
            if not cache.read_into(name, out):
                out = packed(name)
                cache.add(name, out)
                made.append(name)
            assert torch.equal(out, packed(name))
    return made


def whole(folder: Path) -> Path:
    return folder / f"{KEY}.packed"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "PIECE_BYTES", 10_000)


def test_a_second_start_packs_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert start(tmp_path, said) == list(SIZES)
    assert start(tmp_path, said) == []
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.packed"]


def test_groups_lie_in_the_file_as_in_memory_from_whole_pages_on(tmp_path: Path) -> None:
    start(tmp_path)
    data = whole(tmp_path).read_bytes()
    contents = cache_file.Contents.of(KEY, SIZES)
    assert len(data) == contents.size_bytes
    for name, size in SIZES.items():
        offset = contents.offsets[name]
        assert offset % 4096 == 0
        assert data[offset : offset + size] == packed(name).numpy().tobytes()


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_is_found_and_its_group_made_anew(tmp_path: Path, seed: int) -> None:
    start(tmp_path)
    chance = random.Random(seed)
    contents = cache_file.Contents.of(KEY, SIZES)
    name = chance.choice(list(SIZES))
    data = bytearray(whole(tmp_path).read_bytes())
    data[contents.offsets[name] + chance.randrange(SIZES[name])] ^= 1 << chance.randrange(8)
    whole(tmp_path).write_bytes(data)
    said: list[str] = []
    assert start(tmp_path, said) == [name]
    assert len(said) == 1 and name in said[0] and "damaged" in said[0]
    assert start(tmp_path, said) == []
    assert len(said) == 1


@pytest.mark.parametrize("damage", ["cut", "header", "magic", "empty", "longer", "foreign"])
def test_a_damaged_or_foreign_file_is_made_anew_and_that_is_said(
    tmp_path: Path, damage: str
) -> None:
    start(tmp_path)
    data = bytearray(whole(tmp_path).read_bytes())
    if damage == "cut":
        del data[-5000:]
    elif damage == "header":
        data[60] ^= 4
    elif damage == "magic":
        data[0] ^= 1
    elif damage == "empty":
        data.clear()
    elif damage == "longer":
        data += b"1"
    else:
        with PackedCache.open("other", {"a": 10}, print, tmp_path) as other:
            other.add("a", torch.ones(10, dtype=torch.uint8))
        data[:] = (tmp_path / "other.packed").read_bytes()
    whole(tmp_path).write_bytes(data)
    said: list[str] = []
    assert start(tmp_path, said) == list(SIZES)
    assert len(said) == 1 and "made anew" in said[0]
    assert start(tmp_path, said) == []


def test_a_file_with_a_checksum_of_other_weights_is_removed(tmp_path: Path) -> None:
    contents = cache_file.Contents.of(KEY, SIZES)
    start(tmp_path)
    with whole(tmp_path).open("r+b") as file:
        file.write(contents.header(dict.fromkeys(SIZES, "f" * 64)))
    said: list[str] = []
    assert start(tmp_path, said) == list(SIZES)
    assert any("was removed" in text for text in said)
    assert start(tmp_path) == list(SIZES)
    assert start(tmp_path) == []


def test_what_was_written_before_an_error_is_read_by_the_next_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        PackedCache.open(KEY, SIZES, pytest.fail, tmp_path) as cache,
    ):
        cache.add("blocks.0", packed("blocks.0"))
        while not cache.holds("blocks.0"):
            time.sleep(0.001)
        raise RuntimeError
    assert not whole(tmp_path).exists()
    assert start(tmp_path) == ["blocks.1", "blocks.2", "head"]
    assert start(tmp_path) == []


@pytest.mark.parametrize("tail", [b'["0123', b"\xff\n", b'["other", "head", 200000, "00"]\n'])
def test_a_line_cut_off_by_a_kill_is_not_believed(tmp_path: Path, tail: bytes) -> None:
    cache = PackedCache.open(KEY, SIZES, pytest.fail, tmp_path)
    cache.add("blocks.1", packed("blocks.1"))
    cache.close()
    with (tmp_path / f"{KEY}.journal").open("ab") as journal:
        journal.write(tail)
    assert start(tmp_path) == ["blocks.0", "blocks.2", "head"]
    assert start(tmp_path) == []


CHILD = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from fluxtrain.core.quantization import cache_file
    from tests.engine.test_packed_cache import start
    cache_file.PIECE_BYTES = 10_000
    print("ready", flush=True)
    sys.stdin.readline()
    print(len(start(Path(sys.argv[1]))), flush=True)
""")


def child(folder: Path) -> subprocess.Popen[bytes]:
    """A process that waits for a line and then starts once."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_killed_at_any_moment_it_is_whole_in_the_end(tmp_path: Path) -> None:
    chance = random.Random(3)
    for round_ in range(2):
        folder = tmp_path / str(round_)
        packed_groups = len(SIZES)
        for _ in range(2):
            process = child(folder)
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
            time.sleep(chance.random() * 0.03)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert len(start_reads(folder)) <= packed_groups
        start(folder)
        assert start(folder) == []


def start_reads(folder: Path) -> list[str]:
    """The groups that a start would have to pack; writes nothing."""
    said: list[str] = []
    with PackedCache.open(KEY, SIZES, said.append, folder) as cache:
        missing = []
        for name, size in SIZES.items():
            out = torch.zeros(size, dtype=torch.uint8)
            if not cache.read_into(name, out):
                missing.append(name)
            else:
                assert torch.equal(out, packed(name))
    assert said == []  # what the journal names is on the disk
    return missing


@pytest.mark.slow
def test_two_starts_at_once_have_the_same_bytes_and_leave_one_file(tmp_path: Path) -> None:
    processes = [child(tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert start(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.packed"]


def test_while_another_writes_nothing_is_written_and_that_is_said(tmp_path: Path) -> None:
    with (tmp_path / f"{KEY}.partial").open("wb") as partial:
        fcntl.flock(partial, fcntl.LOCK_EX)
        said: list[str] = []
        assert start(tmp_path, said) == list(SIZES)
        assert len(said) == 1 and "another process" in said[0]
        assert not whole(tmp_path).exists()
    assert start(tmp_path) == list(SIZES)
    assert start(tmp_path) == []


def test_a_file_finished_while_its_lock_was_asked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, finished = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not finished:
            finished.append(True)
            (tmp_path / f"{KEY}.partial").unlink()
            assert start(tmp_path) == list(SIZES)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert start(tmp_path) == []


@pytest.mark.parametrize("limit_bytes", [5_000, 100_000, 270_000])
def test_without_room_the_run_goes_on_and_leaves_nothing(tmp_path: Path, limit_bytes: int) -> None:
    """A limit of a process for its files refuses in the middle of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said: list[str] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        assert start(tmp_path, said) == list(SIZES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(said) == 1 and "files may not be as large" in said[0] and "packs again" in said[0]
    assert list(tmp_path.iterdir()) == []
    assert start(tmp_path) == list(SIZES)
    assert start(tmp_path) == []


def test_a_disk_that_becomes_full_is_told(tmp_path: Path) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed_cache.Pieces, "write", full)
        assert start(tmp_path, said) == list(SIZES)
    assert len(said) == 1 and "the disk is full" in said[0]
    assert list(tmp_path.iterdir()) == []
    assert start(tmp_path) == list(SIZES)
    assert start(tmp_path) == []


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=2 << 20)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda _: free)
    said: list[str] = []
    assert start(tmp_path, said) == list(SIZES)
    assert len(said) == 1 and "0.0 GiB free" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_files_that_nobody_finished_are_removed_after_a_week(tmp_path: Path) -> None:
    names = ("old.partial", "old.journal", "new.partial", "new.journal", "busy.partial")
    for name in names:
        (tmp_path / name).write_text("x")
        if not name.startswith("new"):
            week_ago_s = time.time() - 8 * 86_400
            os.utime(tmp_path / name, (week_ago_s, week_ago_s))
    with (tmp_path / "busy.partial").open("rb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        start(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"new.partial", "new.journal", "busy.partial", f"{KEY}.packed"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    said: list[str] = []
    assert start(tmp_path / "file" / "packed", said) == list(SIZES)
    assert len(said) == 1 and "no packed model is kept" in said[0]


def test_the_users_cache_is_below_xdg_cache_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fluxtrain" / "packed"


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
