"""A list of runs shows them all, quickly, whatever state their files are in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Done
from fluxtrain.events.run_folder.run_dir import Holding, RunDir, find_run, list_runs

Make = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo")


def done() -> Done:
    return Done(exit_code=0, step=9, seconds=1.0, loss=2.0, evaluation_loss=None, model_path=None)


def test_runs_are_listed_newest_first_with_their_newest_numbers(
    tmp_path: Path, make_hello: Make, make_step: Make
) -> None:
    assert list_runs(tmp_path / "none") == []
    for age, steps in ((300, 5), (100, 7), (200, 3)):
        run = RunDir(tmp_path / f"run-{age}")
        run.path.mkdir()
        emitter = Emitter(run.journal)
        emitter.emit(make_hello(model=f"model-{age}"))
        for step in range(1, steps + 1):
            emitter.emit(make_step(step, loss=step / 2))
        emitter.emit(done())
        emitter.close()
        aged = run.journal.read_bytes().replace(b'"wall_s":', b'"wall_s":-%d,"x":' % age, 1)
        run.journal.write_bytes(aged)
    (tmp_path / "unrelated").mkdir()
    (tmp_path / "file").write_text("")
    runs = list_runs(tmp_path)
    assert [(run.model, run.step, run.loss) for run in runs] == [
        ("model-100", 7, 3.5),
        ("model-200", 3, 1.5),
        ("model-300", 5, 2.5),
    ]
    assert {run.state for run in runs} == {"finished"}
    assert runs[0].total_steps == 100
    assert runs[0].method == "full"


def test_a_folder_of_another_user_hides_no_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_json(run.run, {})
    closed = RunDir.create(run.path.parent, "closed")
    exists = Path.exists

    def refused(path: Path, **options: Any) -> bool:
        if closed.path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", refused)
    assert [one.run_id for one in list_runs(run.path.parent)] == [run.run_id]


def test_last_is_the_run_that_was_started_last_also_in_another_folder(
    tmp_path: Path, make_hello: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def started(path: Path) -> Path:
        run = RunDir(path)
        holding = Holding(run)
        emitter = Emitter(run.journal)
        emitter.emit(make_hello())
        emitter.close()
        holding.release()
        return run.path

    usual = started(tmp_path / "runs" / "usual")
    assert find_run("last") == usual and not (tmp_path / "state").exists()
    other = started(tmp_path / "runs" / ".." / "elsewhere" / "x")
    assert find_run("last") == other == tmp_path / "elsewhere" / "x"
    again = started(tmp_path / "runs" / "again")
    assert find_run("last") == again
    shutil.rmtree(again)
    assert find_run("last") == other
    shutil.rmtree(other)
    assert find_run("last") == usual
