"""Runs that change while they are read: gone on with, started over, taken away, not read yet."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui.headless import follow_lines
from fluxtui.panels.progress import body as progress
from fluxtui.screens.plan import plan_lines
from fluxtui.sources.journal import JournalSource
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line


def text(lines: list[Line]) -> str:
    return "\n".join("".join(part for part, _ in line) for line in lines)


# --- gone on with ---------------------------------------------------------------------------------


def resumed_at(made: ModuleType, step: int, *more: ev.AnyEvent) -> FoldedRun:
    """Eighty steps with evaluations after 40 and 80, and a process that goes on after `step`."""
    again = [made.hello(pid=4243, first_step=step), made.planned(), *more]
    return FoldedRun().after_all([*made.training(80), *made.stamped(again, made.START_S + 900)])


@pytest.mark.parametrize(("step", "told"), [(80, True), (60, False), (20, False)])
def test_an_evaluation_that_is_still_to_come_again_is_not_told(
    made: ModuleType, step: int, told: bool
) -> None:
    state = resumed_at(made, step)
    shown = text(progress(View(state=state, wall_s=state.last_wall_s or 0.0), 160, 2))
    assert ("@80" in shown) == told
    assert [at for at, _ in state.evaluations] == [at for at in (40, 80) if at <= step]


def test_the_plan_of_a_process_is_compared_with_its_own_steps(made: ModuleType) -> None:
    def measured(*more: ev.AnyEvent) -> str:
        state = resumed_at(made, 60, *more)
        [line] = [
            one for one in text(plan_lines(View(state=state), 100)).split("\n") if "median" in one
        ]
        return line

    assert "900 ms" not in measured(), "those steps are of the process before"
    slower = [replace(made.step(61 + i), step_s=2.0 if i >= 3 else 9.0) for i in range(10)]
    assert "2.00 s" in measured(*slower)


# --- started over ---------------------------------------------------------------------------------


def test_a_journal_that_starts_again_behind_an_endless_line_is_read_from_its_first_line(
    tmp_path: Path, made: ModuleType
) -> None:
    journal = tmp_path / "events.ndjson"
    journal.write_bytes(b"x" * 20_000)
    follower = JournalFollower(journal)
    assert follower.poll() == [] and follower.garbage_lines == 1
    made.write(journal, made.training(1))
    events = follower.poll()
    assert isinstance(events[0], ev.Hello) and len(events) == len(made.training(1))
    assert follower.garbage_lines == 0, "those were of the other journal"


# --- taken away -----------------------------------------------------------------------------------


def test_lines_of_a_run_end_when_its_folder_is_gone(
    tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "runs" / "demo")
    made.write(run.journal, made.training(3))
    with run.lock():
        monkeypatch.setattr("fluxtui.headless.POLL_PERIOD_S", 0.01)
        threading.Timer(0.2, shutil.rmtree, (run.path,)).start()
        with pytest.raises(BadInput, match="its folder is gone"):
            follow_lines(run.path)


def test_lines_of_a_run_that_has_spoken_its_end_do_not_mind_its_folder(
    tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "runs" / "demo")
    made.write(run.journal, made.finished())
    assert follow_lines(run.path) == 0


def test_a_folder_that_cannot_be_asked_is_no_end_of_its_lines(
    tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "runs" / "demo")
    made.write(run.journal, made.finished())
    answers = iter([OSError(13, "Permission denied", "pid"), "finished"])

    def liveness(self: RunDir) -> Any:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("fluxtui.headless.POLL_PERIOD_S", 0.01)
    monkeypatch.setattr(RunDir, "liveness", liveness)
    assert follow_lines(run.path) == 0


def test_a_folder_that_comes_back_is_followed_again(tmp_path: Path, made: ModuleType) -> None:
    made.write(tmp_path / "demo" / "events.ndjson", made.training(2))
    source = JournalSource(tmp_path / "demo")
    source.poll()
    os.rename(tmp_path / "demo", tmp_path / "away")
    assert "its folder is gone" in (source.poll().link.problem or "")
    made.write(tmp_path / "demo" / "events.ndjson", made.training(4))
    batch = source.poll()
    assert batch.restarted and batch.link.problem is None
    assert len(batch.events) == len(made.training(4))


# --- not read yet ---------------------------------------------------------------------------------
