"""Which run a command means, and what a process leaves behind whatever happens to it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.config.schema import demo_config
from fluxtrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_DOES_NOT_FIT,
    BadInput,
    Diverged,
    DoesNotFit,
    FluxTrainError,
    Interrupted,
    NoSpace,
)
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.control import send_command
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.checkpoint.recovery import locate, stored_config
from fluxtrain.train.session import Session


@pytest.fixture(autouse=True)
def _runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))


def a_run(path: Path, config: Any = None, checkpoint: int | None = None) -> RunDir:
    """A directory as a run leaves it."""
    path.mkdir(parents=True)
    run = RunDir(path)
    run.journal.write_bytes(b"")
    content = (config or demo_config()).model_dump(mode="json")
    run.write_json(run.run, {"config": content})
    if checkpoint is not None:
        folder = run.checkpoints / f"step-{checkpoint:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    return run


# --- which run ------------------------------------------------------------------------------------


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(tmp_path: Path) -> None:
    assert not locate("auto", tmp_path / "new", demo_config()).resumes
    a_run(tmp_path / "old")
    assert locate("auto", tmp_path / "old", demo_config()).resumes


def test_auto_without_a_directory_takes_the_newest_unfinished_run_of_the_same_configuration(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "20260101-000000-demo")
    newer = a_run(runs / "20260102-000000-demo")
    a_run(runs / "20260103-000000-other", demo_config(["train.steps=7"]))
    finished = a_run(runs / "20260104-000000-demo")
    finished.write_json(finished.result, {"exit_code": 0})
    (runs / "20260105-000000-odd").mkdir()
    (runs / "20260105-000000-odd" / "run.json").write_text("not JSON")
    target = locate("auto", None, demo_config())
    assert target.resumes
    assert target.run_dir.path == newer.path
    fresh = locate("auto", None, demo_config(["train.steps=8"]))
    assert not fresh.resumes


def test_last_and_an_id_name_a_run_that_goes_on(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "20260101-000000-demo")
    newer = a_run(runs / "20260102-000000-demo")
    for named in ("last", newer.path.name, "20260102"):
        target = locate(named, None, demo_config())
        assert target.resumes and target.run_dir.path == newer.path
    with pytest.raises(BadInput, match="no run 'lost'"):
        locate("lost", None, demo_config())


def test_a_checkpoint_names_its_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", checkpoint=30)
    by_run = locate(str(run.path), None, None)
    assert (by_run.run_dir.path, by_run.checkpoint) == (run.path, None)
    folder = run.checkpoints / "step-00000030"
    by_checkpoint = locate(str(folder), run.path, None)
    assert by_checkpoint.run_dir.path == run.path
    assert by_checkpoint.checkpoint == folder
    with pytest.raises(BadInput, match="leave one out"):
        locate(str(folder), tmp_path / "elsewhere", None)


def test_a_runs_own_configuration_comes_back_with_changes(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", demo_config(["train.steps=7"]))
    assert stored_config(run) == demo_config(["train.steps=7"])
    assert stored_config(run, ["train.steps=9"]).train.steps == 9
    int8 = ["parallel.mode=fsdp", "comm.compress=int8", "comm.config={block: 128}"]
    run.run.write_text(json.dumps({"config": demo_config(int8).model_dump(mode="json")}))
    assert stored_config(run, ["comm.compress=topk"]).comm.config == {}
    run.run.write_text("{}")
    with pytest.raises(BadInput, match=r"no readable run\.json"):
        stored_config(run)


# --- a session ------------------------------------------------------------------------------------


def hello(run: RunDir) -> ev.Hello:
    return ev.Hello(
        run_id=run.run_id, run_dir=str(run.path), pid=os.getpid(), pid_start_s=0.0, version="0",
        model="m", method="full", dtype="float32", device="cpu", machine="", blocks=0,
        parameters=0, trained_parameters=0, total_steps=3,
    )  # fmt: skip


def step(number: int) -> ev.StepFinished:
    return ev.StepFinished(
        step=number, total_steps=9, epoch=0.1, loss=5.5, learning_rate=3e-4, grad_norm=1.25,
        tokens=2048, total_tokens=2048 * number, step_s=0.5, tokens_per_s=4096.0, phases_s={},
        stalls_s={},
    )  # fmt: skip


def journal(run: RunDir) -> list[Any]:
    return list(read_events(run.journal))


def open_session(run: RunDir) -> Session:
    session = Session(run, json=True)
    session.announcer.emit(hello(run))
    return session


ENDINGS = [
    (None, 0, "result.json", "finished"),
    (Interrupted("stopped after step 2", 130), 130, "result.json", "stopped"),
    (Interrupted("stopped after step 2", 143), 143, "result.json", "stopped"),
    (Diverged("the loss is nan"), 4, "error.json", "failed"),
    (NoSpace("no space left"), 5, "error.json", "failed"),
    (ZeroDivisionError("a bug"), 1, "error.json", "failed"),
    (MemoryError("3 GiB"), 3, "error.json", "failed"),
]


@pytest.mark.parametrize(("error", "code", "file", "state"), ENDINGS)
def test_every_ending_is_on_record_with_its_code(
    tmp_path: Path, error: BaseException | None, code: int, file: str, state: str
) -> None:
    run = RunDir(tmp_path / "run")

    def work() -> None:
        with open_session(run) as session:
            session.begin_training()
            session.state.step_done(1.5, tokens=10, seconds=0.1)
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    content = json.loads((run.path / file).read_text())
    assert content["exit_code"] == code
    assert content["step"] == 1
    assert run.liveness() == state
    last = journal(run)[-1]
    assert isinstance(last, ev.Done if file == "result.json" else ev.Failed)
    assert last.exit_code == code
    other = {"result.json", "error.json"} - {file}
    assert not (run.path / other.pop()).exists()
    if file == "error.json":
        assert type(error).__name__ in run.log.read_text()


REFUSALS = [
    (BadInput("no such file"), EXIT_BAD_INPUT),
    (DoesNotFit("needs 3 GiB"), EXIT_DOES_NOT_FIT),
]


@pytest.mark.parametrize(("error", "code"), REFUSALS)
def test_a_run_that_ends_before_it_trains_for_its_input_is_refused_with_the_reason(
    tmp_path: Path, error: FluxTrainError, code: int
) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(type(error)), open_session(run):
        raise error
    summary = run.summary()
    assert (summary.state, summary.exit_code) == ("refused", code)
    assert summary.message == str(error)
    last = journal(run)[-1]
    assert isinstance(last, ev.Failed) and last.refused
    run.error.unlink()  # the journal alone tells the same
    assert run.summary().state == "refused"


@pytest.mark.parametrize(("error", "code"), REFUSALS)
def test_a_run_that_trained_is_not_refused_whatever_ends_it(
    tmp_path: Path, error: FluxTrainError, code: int
) -> None:
    in_its_first_step = RunDir(tmp_path / "first")
    with pytest.raises(type(error)), open_session(in_its_first_step) as session:
        session.begin_training()
        raise error
    killed = RunDir(tmp_path / "killed")
    with open_session(killed) as session:
        session.announcer.emit(step(7))
    killed.result.unlink()
    with pytest.raises(type(error)), open_session(killed):
        raise error
    for run in (in_its_first_step, killed):
        assert (run.summary().state, run.summary().exit_code) == ("failed", code)
        last = journal(run)[-1]
        assert isinstance(last, ev.Failed) and not last.refused


@pytest.mark.parametrize("error", [BadInput("no such file"), Interrupted("stopped", 130)])
def test_a_process_that_makes_no_step_leaves_a_runs_end_as_it_was(
    tmp_path: Path, error: FluxTrainError
) -> None:
    run = RunDir(tmp_path / "run")
    with open_session(run) as session:
        session.begin_training()
        session.announcer.emit(step(7))
    ended, a_while_ago_s = run.result.read_bytes(), time.time() - 60
    os.utime(run.result, (a_while_ago_s, a_while_ago_s))
    with pytest.raises(type(error)), open_session(run):
        assert run.liveness() == "running"
        raise error
    assert run.result.read_bytes() == ended and not run.error.exists()
    assert run.summary().state == "finished"
    with pytest.raises(Diverged), open_session(run) as session:
        session.begin_training()
        assert not run.result.exists()
        raise Diverged("nan")
    assert (run.summary().state, run.result.exists()) == ("failed", False)


def test_a_session_answers_while_it_lives_and_frees_everything_after(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with open_session(run) as session:
        session.listen()
        assert send_command(run.socket, "pause").ok
        assert session.requests.paused
        assert not send_command(run.socket, "fly").ok
        assert not send_command(run.socket, "apply").ok
        with pytest.raises(BadInput, match="in use"):
            Session(run)
    assert not run.socket.exists()
    with run.lock():
        pass
    answers = [e for e in journal(run) if isinstance(e, ev.CommandAnswered)]
    assert [(a.command, a.ok) for a in answers] == [("pause", True), ("apply", False)]
    beats = [e for e in journal(run) if isinstance(e, ev.Heartbeat)]
    assert beats[-1].phase == "starting"


def test_a_refused_session_leaves_the_others_files_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with open_session(run):
        run.write_json(run.result, {"exit_code": 9})
        with pytest.raises(BadInput):
            Session(run)
        assert json.loads(run.result.read_text()) == {"exit_code": 9}
