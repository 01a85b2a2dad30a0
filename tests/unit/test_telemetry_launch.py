"""The trainer and the app are two processes, and the death of one does not hurt the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events.events import Done, PhaseChanged
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.launch import TRAINER, TrainerProcess, start_trainer
from fluxtrain.events.run_folder.process import ProcessMark
from fluxtrain.events.run_folder.run_dir import RunDir

TRAINER_PROGRAM = """
import os, sys, time
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Done, LogWritten, PhaseChanged
from fluxtrain.events.run_folder.run_dir import RunDir

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = RunDir(arguments["--run-dir"])
lock = run.lock()
emitter = Emitter(run.journal, int(arguments["--live-fd"]))
print("standard output", sys.argv[1:])
print("standard error", file=sys.stderr)
emitter.emit(LogWritten(level="info", text=f"{os.getsid(0)} {sys.stdin.read()!r}"))
may_end = arguments.get("--until")
for tick in range(int(arguments["--ticks"])):
    while tick == 10 and may_end and not os.path.exists(may_end):
        time.sleep(0.01)
    emitter.emit(PhaseChanged(phase="training"))
    time.sleep(0.01)
emitter.emit(Done(exit_code=0, step=1, seconds=0.1, loss=None, evaluation_loss=None,
                  model_path=None))
emitter.close()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "launch")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return [sys.executable, str(program)]


def wait_until(true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.01)


def drain(trainer: TrainerProcess) -> list[Any]:
    events: list[Any] = []
    wait_until(lambda: bool(events.extend(trainer.reader.poll())) or trainer.reader.closed)
    return events


def test_a_trainer_gets_a_pipe_a_log_and_a_session_of_its_own(
    run: RunDir, command: list[str]
) -> None:
    trainer = start_trainer(["--ticks", "3"], run, command)
    assert trainer.wait(120) == 0
    events = drain(trainer)
    assert [type(event).__name__ for event in events] == [
        "LogWritten",
        *["PhaseChanged"] * 3,
        "Done",
    ]
    assert events == list(read_events(run.journal))
    assert events[0].text == f"{trainer.pid} ''"  # leads its session, and reads nothing
    log = run.log.read_text()
    assert "standard output" in log and "standard error" in log
    assert f"'--run-dir', '{run.path}'" in log


def test_the_real_command_ignores_modules_of_the_current_folder() -> None:
    assert (sys.executable, "-P", "-m", "fluxtrain", "train") == TRAINER


def test_the_trainer_survives_an_app_that_is_killed(run: RunDir, command: list[str]) -> None:
    app_program = f"""
import os, sys, time
from fluxtrain.events.run_folder.launch import start_trainer
arguments = ["--ticks", "100", "--until", {str(run.path / "killed")!r}]
trainer = start_trainer(arguments, {str(run.path)!r}, {command!r})
print(trainer.pid, flush=True)
time.sleep(600)
"""
    app = subprocess.Popen([sys.executable, "-c", app_program], stdout=subprocess.PIPE)
    assert app.stdout is not None
    assert int(app.stdout.readline()) > 0
    wait_until(lambda: run.journal.exists() and len(list(read_events(run.journal))) > 3)
    app.send_signal(signal.SIGKILL)
    app.communicate()
    (run.path / "killed").touch()
    wait_until(lambda: run.liveness() == "finished")
    events = list(read_events(run.journal))
    assert sum(isinstance(event, PhaseChanged) for event in events) == 100
    assert isinstance(events[-1], Done)
    assert events[-1].dropped >= 1  # it noticed that the reader was gone
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


def test_a_killed_trainer_is_seen_as_dead_though_nobody_reaped_it(
    run: RunDir, command: list[str]
) -> None:
    trainer = start_trainer(["--ticks", "3000"], run, command)
    wait_until(lambda: run.liveness() == "running")
    trainer.kill()
    wait_until(lambda: run.liveness() == "dead")
    assert trainer.wait(120) == -signal.SIGKILL
    drain(trainer)
    assert trainer.exit_code() == -signal.SIGKILL
    trainer.kill()  # again, and nothing happens


def test_a_reused_pid_is_not_taken_for_the_old_process() -> None:
    mine = ProcessMark.mine()
    assert mine.is_alive() and mine.is_local
    earlier = ProcessMark(pid=mine.pid, start_s=mine.start_s - 10, host=mine.host)
    assert not earlier.is_alive()
