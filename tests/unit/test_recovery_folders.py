"""Which folders a run that is stopped leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fluxtrain.errors import EXIT_TERMINATED, BadInput, FluxTrainError, Interrupted
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.checkpoint.recovery import Target, find, has_run, truly_told

STOPPED = Interrupted("stopped before a step was made", EXIT_TERMINATED)


def a_run(tmp_path: Path, *more: str) -> RunDir:
    """A folder made for a run, as its process leaves it, with `more` in it."""
    run = RunDir.create(tmp_path)
    run.lock().release()
    for path in (run.log, run.journal, run.result, *(run.path / name for name in more)):
        path.write_text("something")
    return run


def told(run: RunDir, error: FluxTrainError, *, made: bool = True) -> str:
    with (
        pytest.raises(type(error)) as raised,
        truly_told(Target(run_dir=run, resumes=False, made=made)),
    ):
        raise error
    assert raised.value.exit_code == error.exit_code
    return str(raised.value)


def test_what_a_stopped_run_wrote_for_itself_alone_is_removed(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert told(run, STOPPED) == "stopped before a step was made: nothing was kept"
    assert not run.path.exists()


@pytest.mark.parametrize("name", ["run.json", "plan.json", "checkpoints", "notes.txt", "x.trace"])
def test_a_folder_with_anything_else_in_it_stays_as_it_is(tmp_path: Path, name: str) -> None:
    run = a_run(tmp_path, name)
    assert told(run, STOPPED) == str(STOPPED)
    assert {name, "engine.log", "events.ndjson"} <= {path.name for path in run.path.iterdir()}


def test_a_folder_that_another_process_took_meanwhile_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with run.lock():
        assert told(run, STOPPED) == str(STOPPED)
        assert run.log.exists()


@pytest.mark.parametrize("name", ["run.json", "plan.json", "result.json", "error.json"])
def test_files_of_others_that_a_run_would_replace_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1, "choices": []}')
    with pytest.raises(BadInput, match=f"{name} is there already and is not of a run"):
        find(None, tmp_path, None)
    assert (tmp_path / name).read_text() == '{"mine": 1, "choices": []}'


def test_a_run_begins_beside_other_files_and_where_one_was_refused_before(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: demo}")
    (tmp_path / "data.jsonl").write_text("{}")
    for name, content in (
        ("run.json", {"config": {}, "versions": {}}),
        ("plan.json", {"choices": [], "chunk_rows": 1}),
        ("result.json", {"exit_code": 2, "message": ""}),
        ("error.json", {"exit_code": 2, "message": ""}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    found = find(None, tmp_path, None)
    assert found is not None and not found.resumes


def test_checkpoints_of_another_program_are_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_text("mine")
    assert not has_run(RunDir(tmp_path))
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    assert has_run(RunDir(tmp_path))
