"""A run's folder that is renamed, deleted, swapped, or whose lock is removed, is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.events.run_folder.control import ControlServer
from fluxtrain.events.run_folder.holding import Holding
from fluxtrain.events.run_folder.run_dir import RunDir


@pytest.fixture
def held(tmp_path: Path) -> Holding:
    return Holding(RunDir(tmp_path / "runs" / "run"))


@pytest.mark.parametrize("renamed", ["run", "."], ids=["the folder", "a folder above"])
def test_a_renamed_folder_is_followed(held: Holding, tmp_path: Path, renamed: str) -> None:
    told: list[tuple[Path, Path]] = []
    held.followed_by(lambda old, new: told.append((old, new)))
    source = tmp_path / "runs" / renamed
    target = tmp_path / "elsewhere"
    source.rename(target)
    new = target if renamed == "run" else target / "run"
    second = Holding(RunDir(tmp_path / "runs" / "run"))  # at the old path
    held.look()
    held.look()
    assert told == [(tmp_path / "runs" / "run", new)]
    assert held.run_dir.path == new and held.is_held
    with pytest.raises(BadInput, match="in use by process"):
        RunDir(new).lock()
    second.look()
    second.release()


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "another in its place"])
def test_a_folder_that_is_gone_ends_in_words(held: Holding, again: bool) -> None:
    shutil.rmtree(held.run_dir.path)
    if again:
        held.run_dir.path.mkdir()
        (held.run_dir.path / "pid").write_text("")
    for _ in range(2):
        with pytest.raises(BadInput, match="was deleted, or moved to another disk") as raised:
            held.look()
    assert raised.value.exit_code == EXIT_BAD_INPUT and "--resume" in str(raised.value)
    assert not held.is_held


def test_a_lock_that_was_removed_is_taken_again(held: Holding) -> None:
    held.run_dir.pid.unlink()
    held.look()
    assert held.run_dir.liveness() == "running"
    with pytest.raises(BadInput, match="in use by process"):
        held.run_dir.lock()
    held.release()
    held.run_dir.lock().release()


def test_the_socket_of_another_trainer_at_the_old_path_stays(held: Holding, tmp_path: Path) -> None:
    server = ControlServer(held.run_dir.socket, lambda *_: (True, ""))
    server.start()
    held.run_dir.path.rename(tmp_path / "moved")
    held.run_dir.path.mkdir()
    other = ControlServer(held.run_dir.socket, lambda *_: (True, ""))
    other.start()
    server.close()
    assert held.run_dir.socket.exists()
    other.close()
    assert not held.run_dir.socket.exists()
