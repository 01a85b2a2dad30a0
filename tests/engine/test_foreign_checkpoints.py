"""A checkpoint that is damaged, lacks a part or was put there by others costs itself alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.files.cache import Damaged
from fluxtrain.train.checkpoint.checkpoint import read_checkpoint
from fluxtrain.train.checkpoint.newest import newest_resumable
from tests.conftest import EXPLORES
from tests.engine.test_checkpoint_writer import FakeData, FakeEngine, state_at, writer

NEWEST = "step-00000010"
FLIPS = 5_000 if EXPLORES else 150


def two_checkpoints(root: Path) -> None:
    """Write those of steps 5 and 10, of the same run."""
    made, _ = writer(root)
    for step in (5, 10):
        made.write(state_at(step), FakeEngine(step), FakeData())


def resumed(root: Path) -> tuple[int, FakeEngine, list[str]]:
    """Resume from the newest whole checkpoint: step, engine, warnings."""
    made, told = writer(root)
    warnings: list[str] = []
    found = newest_resumable(root, warnings.append)
    assert found is not None
    engine: Any = FakeEngine(99)
    state = made.resume(found, engine, FakeData())
    return state.step, engine, [*warnings, *(event.text for event in told.events)]


def test_where_none_is_whole_nothing_is_started_over(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for path in tmp_path.glob("step-*"):
        (path / "shard-00000.safetensors").unlink()
    with pytest.raises(BadInput, match="all 2 checkpoints under .* are damaged"):
        resumed(tmp_path)


def test_a_checkpoint_that_the_user_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    named = replace(read_checkpoint(tmp_path / NEWEST), named=True)
    (tmp_path / NEWEST / "shard-00000.safetensors").unlink()
    made, _ = writer(tmp_path)
    with pytest.raises(Damaged, match="No such file.*: name another checkpoint"):
        made.resume(named, FakeEngine(9), FakeData())


@pytest.mark.parametrize(
    "kind", ["folder", "manifest.json", "trainer.json", "shard-00000.safetensors"]
)
@pytest.mark.parametrize("odd", ["link", "pipe", "device"])
def test_a_link_or_a_pipe_in_a_checkpoint_is_damage(tmp_path: Path, kind: str, odd: str) -> None:
    two_checkpoints(tmp_path)
    path = tmp_path / NEWEST / ("" if kind == "folder" else kind)
    path.rename(aside := tmp_path / "aside")
    if odd == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(aside if odd == "link" else "/dev/zero")
    step, _, warnings = resumed(tmp_path)
    assert step == 5
    assert (odd == "link" and kind != "folder") <= bool(warnings)
    assert (aside / "manifest.json").exists() if kind == "folder" else aside.exists()


# --- flipped bits, copies, other ends -------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    two_checkpoints(root)
    return root


@given(data=st.data())
@settings(max_examples=FLIPS)
def test_a_flipped_bit_anywhere_costs_the_checkpoint_and_no_more(
    pristine: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        shutil.copytree(pristine, root)
        path = data.draw(st.sampled_from(sorted((root / NEWEST).iterdir())))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        harmed = bytes(content) != path.read_bytes()
        path.write_bytes(content)
        step, engine, warnings = resumed(root)
        assert step == (5 if harmed else 10)
        for name, tensors in FakeEngine(step).shards.items():
            assert torch.equal(engine.shards[name]["w"], tensors["w"])
        assert any(NEWEST in text and "damaged" in text for text in warnings) is harmed


def test_a_step_beyond_the_end_of_the_run_is_refused_with_the_cure(tmp_path: Path) -> None:
    made, _ = writer(tmp_path)
    for step in (20, 25):
        made.write(state_at(step), FakeEngine(step), FakeData())
    step, _, warnings = resumed(tmp_path)
    assert step == 20
    assert any("is of step 25 and the run ends at step 20: raise" in text for text in warnings)
