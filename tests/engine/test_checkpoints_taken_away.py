"""A folder of checkpoints that is deleted, replaced or closed while a run trains."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput, Interrupted
from fluxtrain.events import events as ev
from fluxtrain.train.checkpoint import checkpoint as checkpoints
from fluxtrain.train.checkpoint import shard_file
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.checkpoint.writer import CannotSave
from fluxtrain.train.loop import TrainingLoop
from tests.engine.runs import MakeConfig, run, told
from tests.engine.test_background_checkpoints import MIB, held_to
from tests.engine.test_checkpoint_writer import FakeData, FakeEngine, state_at, writer
from tests.engine.test_resume import assert_same_run

Fault = Callable[[Path], None]


def deleted(root: Path) -> None:
    shutil.rmtree(root)


def cut(root: Path) -> None:
    """The files of what is being written, but not its folder, as by a racing `rm -rf`."""
    for path in root.glob(".writing-*/*.safetensors"):
        path.unlink()


def half_deleted(root: Path) -> None:
    for path in root.glob(".writing-*"):
        shutil.rmtree(path)


def a_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("notes")


def a_link(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to("elsewhere")


FAULTS = [deleted, half_deleted, cut, a_file, a_link]


def while_writing(monkeypatch: pytest.MonkeyPatch, fault: Fault, times: int = 1) -> None:
    """Let `fault` happen as the manifest of a checkpoint is about to be written."""
    real, left = checkpoints.write_json, [None] * times

    def write(path: Path, value: Any) -> Any:
        if path.name == "manifest.json" and left:
            left.pop()
            fault(path.parent.parent)
        return real(path, value)

    monkeypatch.setattr(checkpoints, "write_json", write)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("budget_bytes", [0, 64 * MIB], ids=["waits", "background"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_whose_folder_is_taken_away_is_written_again(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fault: Fault, budget_bytes: int,
) -> None:  # fmt: skip
    config = run_config(train__steps=6, train__checkpoint_every=2, train__evaluate_every="end")
    held_to(monkeypatch, budget_bytes)
    run(config, tmp_path / "whole")
    while_writing(monkeypatch, fault)
    run(config, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        read_checkpoint(path)
    written = [event.step for event in told(tmp_path / "run", ev.CheckpointWritten)]
    assert written[-2:] == [4, 6] and (2 in written) == (not budget_bytes)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_file_in_the_place_of_the_checkpoints_is_put_aside_and_that_is_said(
    tmp_path: Path,
) -> None:
    made, kept = writer(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("notes")
    (tmp_path / "kept-from-run").write_text("in the way, too")
    assert read_checkpoint(made.write(state_at(5), FakeEngine(1), FakeData()).path).step == 5
    assert (tmp_path / "kept-from-run-1" / "checkpoints").read_text() == "notes"
    (said,) = [event.text for event in kept.events if isinstance(event, ev.LogWritten)]
    assert "is a file" in said and str(tmp_path / "kept-from-run-1" / "checkpoints") in said


def test_a_saved_step_whose_checkpoint_was_deleted_is_saved_again(tmp_path: Path) -> None:
    made, _ = writer(tmp_path / "checkpoints")
    first = made.write(state_at(5), FakeEngine(1), FakeData())
    deleted(tmp_path / "checkpoints")
    assert "step 5) was removed by others" in made.last_text()
    assert made.write(state_at(5), FakeEngine(1), FakeData()) == first
    assert read_checkpoint(first.path).step == 5 and "last good checkpoint" in made.last_text()


def refusing(monkeypatch: pytest.MonkeyPatch, code: int, allowed: int = 0) -> None:
    """A disk that refuses the files of all checkpoints but the first `allowed`."""
    real, left = shard_file.HashingFile.__init__, [None] * allowed

    def refuse(self: Any, path: Path) -> None:
        if path.name == "shard-00000.safetensors":
            if not left:
                raise OSError(code, os.strerror(code), str(path))
            left.pop()
        real(self, path)

    monkeypatch.setattr(shard_file.HashingFile, "__init__", refuse)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("budget_bytes", [0, 64 * MIB], ids=["waits", "background"])
def test_a_run_that_cannot_save_goes_on_and_says_so_and_saves_its_model(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    code: int, budget_bytes: int,
) -> None:  # fmt: skip
    config = run_config(train__steps=6, train__checkpoint_every=2, train__evaluate_every="end")
    held_to(monkeypatch, budget_bytes)
    refusing(monkeypatch, code)
    run(config, tmp_path / "run")
    warned = [event.text for event in told(tmp_path / "run", ev.LogWritten)]
    refused = [text for text in warned if "is not saved" in text]
    steps = [int(text.split()[1]) for text in refused]
    assert steps[-1] == 6 and (budget_bytes or steps == [2, 4, 6])
    assert len(steps) >= 2 and not list_checkpoints(tmp_path / "run" / "checkpoints")
    for text in refused:
        assert os.strerror(code) in text and "let this user write there" in text
        assert "in 2 attempts" in text and "no checkpoint was written yet" in text
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_stop_whose_checkpoint_cannot_be_written_ends_in_words_with_code_2(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrainingLoop._compute

    def compute(self: TrainingLoop[Any], clock: Any) -> Any:
        if self.state.step == 2:
            self._requests.stop(143)
        return real(self, clock)

    monkeypatch.setattr(TrainingLoop, "_compute", compute)
    refusing(monkeypatch, errno.EACCES, allowed=1)
    config = run_config(train__steps=9, train__checkpoint_every=2, train__evaluate_every="end")
    with pytest.raises(BadInput, match=r"in 2 attempts .*step-00000002 \(step 2\)") as raised:
        run(config, tmp_path / "run")
    assert not isinstance(raised.value, Interrupted) and raised.value.exit_code == EXIT_BAD_INPUT
    (failed,) = told(tmp_path / "run", ev.Failed)
    assert (failed.exit_code, failed.kind) == (EXIT_BAD_INPUT, CannotSave.__name__)


def test_an_older_checkpoint_that_cannot_be_removed_costs_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kept = writer(tmp_path)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "step-00000005":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    for step in (5, 10, 15):
        made.write(state_at(step), FakeEngine(step), FakeData())
    assert len(list_checkpoints(tmp_path)) == 3
    (said,) = [event.text for event in kept.events if isinstance(event, ev.LogWritten)]
    assert "an older checkpoint cannot be removed" in said and "step-00000005" in said
