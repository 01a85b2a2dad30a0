"""Checkpoints are whole or absent, and what is damaged is never taken for good."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluxtrain.errors import NoSpace
from fluxtrain.files.cache import Damaged
from fluxtrain.train.checkpoint import shard_file
from fluxtrain.train.checkpoint.checkpoint import (
    list_checkpoints,
    prune,
    read_checkpoint,
    remove_unfinished,
    write_checkpoint,
)
from fluxtrain.train.checkpoint.randomness import (
    random_state,
    restore_random_state,
    seed_everything,
)
from fluxtrain.train.checkpoint.shard_file import hash_file, write_tensors

Shards = list[tuple[str, dict[str, Tensor]]]


def shards(seed: int = 0) -> Shards:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            f"block.{i}",
            {
                "hi": torch.randn(33, 7, generator=generator).bfloat16(),
                "lo": torch.randint(0, 65535, (231,), generator=generator).to(torch.uint16),
                "m": torch.randn(231, generator=generator),
                "v": torch.rand(11, 21, generator=generator).t(),  # not contiguous
                "step": torch.tensor(3 + i),
                "empty": torch.zeros(0),
            },
        )
        for i in range(3)
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(a.contiguous().reshape(-1).view(torch.uint8).numpy())
        == bytes(b.contiguous().reshape(-1).view(torch.uint8).numpy())
    )


def test_a_checkpoint_gives_back_every_bit(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, 12, shards(), {"note": [1, 2.5, None]})
    found = read_checkpoint(written.path)
    assert found == written
    assert found.step == 12
    assert found.trainer_state() == {"note": [1, 2.5, None]}
    for (name, tensors), (expected_name, expected) in zip(
        found.load_shards(), shards(), strict=True
    ):
        assert name == expected_name
        assert tensors.keys() == expected.keys()
        assert all(same(tensors[key], expected[key]) for key in expected)


def test_our_files_are_what_the_safetensors_library_writes_and_reads(tmp_path: Path) -> None:
    tensors = {key: value.contiguous() for key, value in shards()[0][1].items()}
    written = write_tensors(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours, theirs = (
        load_file(tmp_path / "ours.safetensors"),
        load_file(tmp_path / "theirs.safetensors"),
    )
    assert all(same(ours[key], theirs[key]) for key in tensors)
    assert written == hash_file(tmp_path / "ours.safetensors")
    header_bytes = int.from_bytes((tmp_path / "ours.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "ours.safetensors").read_bytes()[8 : 8 + header_bytes])
    for facts in header.values():  # each tensor starts at a multiple of its element's size
        size = {"BF16": 2, "U16": 2, "F32": 4, "I64": 8}[facts["dtype"]]
        assert (8 + header_bytes + facts["data_offsets"][0]) % size == 0


@pytest.mark.parametrize(
    "harm", ["truncate", "flip", "remove", "manifest", "step", "shards", "deep", "trainer"]
)
def test_any_damage_is_noticed(tmp_path: Path, harm: str) -> None:
    path = write_checkpoint(tmp_path, 1, shards(), {"a": 1}).path
    shard = path / "shard-00001.safetensors"
    if harm == "truncate":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif harm == "flip":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    elif harm == "remove":
        shard.unlink()
    elif harm == "manifest":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-40])
    elif harm in ("step", "shards"):  # whole JSON that names another step, or no shards
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[harm] = {"step": 2, "shards": []}[harm]
        (path / "manifest.json").write_text(json.dumps(manifest))
    elif harm == "deep":
        (path / "manifest.json").write_text("[" * 100_000)
    else:
        (path / "trainer.json").write_text('{"a": 2}\n')
    with pytest.raises(Damaged) as caught:
        read_checkpoint(path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    "forged",
    [
        {"shards": [["block", "../outside.safetensors"]]},
        {"shards": [["block", "not-hashed.safetensors"]]},
        {"files": {"../trainer.json": {"bytes": 1, "sha256": ""}}},
    ],
    ids=str,
)
def test_a_manifest_never_leads_out_of_its_folder_whoever_sealed_it(
    tmp_path: Path, forged: dict[str, Any]
) -> None:
    path = write_checkpoint(tmp_path, 1, shards(), {}).path
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((path / "shard-00000.safetensors").read_bytes())
    manifest = json.loads((path / "manifest.json").read_text()) | forged
    del manifest["sha256"]
    sealed = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    manifest["sha256"] = hashlib.sha256(sealed).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match=r"manifest\.json"):
        read_checkpoint(path)


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10, shards(), {}).path
    (path / "shard-00000.safetensors").write_bytes(b"short")
    write_checkpoint(tmp_path, 10, shards(), {})
    assert read_checkpoint(path).step == 10
    (tmp_path / "step-00000020").write_text("a file in its place")
    assert write_checkpoint(tmp_path, 20, shards(), {}).path.is_dir()


@pytest.mark.parametrize("full_after_bytes", [0, 100, 3000, 6000])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_after_bytes: int
) -> None:
    write_checkpoint(tmp_path, 10, shards(1), {})
    real = shard_file.HashingFile.write
    budget = full_after_bytes

    def write(self: Any, data: bytes) -> None:
        nonlocal budget
        budget -= len(data)
        if budget < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    monkeypatch.setattr(shard_file.HashingFile, "write", write)
    with pytest.raises(NoSpace, match="free"):
        write_checkpoint(tmp_path, 20, shards(2), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert read_checkpoint(tmp_path / "step-00000010").step == 10


def test_what_a_killed_writer_left_is_removed_and_never_listed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, shards(), {})
    partial = tmp_path / ".writing-step-00000020"
    partial.mkdir()
    (partial / "shard-00000.safetensors").write_bytes(b"half")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010"]
    remove_unfinished(tmp_path)
    assert not partial.exists()


def test_pruning_keeps_the_newest_and_never_a_later_one_than_the_step(tmp_path: Path) -> None:
    for step in (5, 10, 15, 90):
        write_checkpoint(tmp_path, step, shards(), {})
    prune(tmp_path, keep=2, step=15)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-00000090",
        "step-00000015",
        "step-00000010",
    ]


def test_all_random_generators_come_back_exactly() -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))

    seed_everything(5)
    draw()
    state = json.loads(json.dumps(random_state()))
    expected = [draw() for _ in range(5)]
    seed_everything(99)
    restore_random_state(state)
    assert [draw() for _ in range(5)] == expected


def test_files_of_others_in_a_checkpoint_outlive_it_under_another_name(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, shards(step), {})
        (tmp_path / f"step-{step:08d}" / "notes.txt").write_text(f"of {step}")
    prune(tmp_path, keep=1, step=30)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000030"]
    for step in (10, 20):
        kept = tmp_path / f"kept-from-step-{step:08d}"
        assert [path.name for path in kept.iterdir()] == ["notes.txt"]
        assert (kept / "notes.txt").read_text() == f"of {step}"
    write_checkpoint(tmp_path, 10, shards(10), {})
    (tmp_path / "step-00000010" / "notes.txt").write_text("later")
    prune(tmp_path, keep=1, step=30)
    assert (tmp_path / "kept-from-step-00000010-1" / "notes.txt").read_text() == "later"


def test_a_linked_folder_of_checkpoints_is_neither_read_nor_tidied(tmp_path: Path) -> None:
    real = tmp_path / "real"
    write_checkpoint(real, 10, shards(), {})
    (real / ".writing-step-00000020").mkdir()
    (tmp_path / "linked").symlink_to(real)
    assert list_checkpoints(tmp_path / "linked") == []
    remove_unfinished(tmp_path / "linked")
    prune(tmp_path / "linked", keep=0, step=99)
    assert sorted(os.listdir(real)) == [".writing-step-00000020", "step-00000010"]
