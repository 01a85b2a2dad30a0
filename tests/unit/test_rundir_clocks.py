"""A running trainer is alive by its ticks and its lock, whatever the clock on the wall does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from fluxtrain.events.events import Heartbeat
from fluxtrain.events.run_folder.process import ProcessMark
from fluxtrain.events.run_folder.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def test_a_process_that_the_mark_does_not_name_is_known_by_its_lock(run: RunDir) -> None:
    with run.lock():
        other = msgspec.structs.replace(ProcessMark.mine(), pid=2**22 - 1)  # as in a container
        run.pid.write_bytes(msgspec.json.encode(other))
        assert run.liveness() == "running"
    run.pid.write_bytes(msgspec.json.encode(other))
    run.journal.write_bytes(b"")
    assert run.liveness() == "dead"


def test_a_look_at_a_run_never_keeps_a_trainer_from_its_lock(run: RunDir) -> None:
    gone = msgspec.structs.replace(ProcessMark.mine(), start_ticks=1)
    run.pid.write_bytes(msgspec.json.encode(gone))
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            run.liveness()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(50):
            run.lock().release()
            run.pid.write_bytes(msgspec.json.encode(gone))
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_the_silence_of_a_trainer_is_told_by_a_clock_that_nobody_sets(
    run: RunDir, set_by_s: float
) -> None:
    with run.lock():
        beat = Heartbeat(
            phase="training", step=1, t_s=time.monotonic() - 20, wall_s=time.time() + set_by_s
        )
        run.journal.write_bytes(msgspec.json.encode(beat) + b"\n")
        os.utime(run.journal, (time.time() + set_by_s, time.time() + set_by_s))
        summary = run.summary()
        assert 20 <= time.time() - summary.updated_s < 30
        assert summary.word() == "stalled"


def test_a_run_that_goes_on_after_the_clock_was_set_back_is_running(run: RunDir) -> None:
    run.write_json(run.result, {"exit_code": 143})
    later_s = time.time() + 3600
    os.utime(run.result, (later_s, later_s))  # as written before the clock was set back
    assert run.liveness() == "stopped"
    with run.lock():
        assert run.liveness() == "running"
