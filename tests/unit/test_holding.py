"""A run's folder that is renamed, deleted, swapped, or whose lock is removed, is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.control import ControlServer
from fluxtrain.events.run_folder.run_dir import Holding, RunDir


@pytest.fixture
def held(tmp_path: Path) -> Holding:
    return Holding(RunDir(tmp_path / "runs" / "run"))


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
