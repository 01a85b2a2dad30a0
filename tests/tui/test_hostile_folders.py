"""Run folders that others filled: pipes, endless files, loops of links, what nobody may read."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import DryRunAnswer
from fluxtrain.events.run_folder.control import NotReachable, send_command
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from fluxtrain.files.atomic import read_json
from fluxtui.answers.answers import Answers
from fluxtui.answers.draft import answers_from_run, load_draft
from fluxtui.app import FluxApp
from fluxtui.screens.picker import RunPicker
from fluxtui.screens.runs import RunsScreen
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.wizard.checks.answer_checks import check_start
from fluxtui.wizard.engine.asked import Question

SIZE = (120, 40)
FILES = ("events.ndjson", "run.json", "result.json", "error.json", "pid", "engine.log")


def in_time(what: Callable[[], Any]) -> Any:
    """Its result; what waits for a pipe would never come back."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(what()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for ever"
    return found[0]


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(
    made: ModuleType, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "runs" / "evil"
    made.write(run / "events.ndjson", made.training(3))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    [summary] = in_time(lambda: list_runs(tmp_path / "runs"))
    assert summary.run_id == "evil"
    link = in_time(lambda: JournalSource(run).poll()).link
    in_time(lambda: ReplaySource(run / "events.ndjson", None).poll())
    if name == "events.ndjson":
        assert link.problem is not None and "not a regular file" in link.problem


@pytest.mark.parametrize("name", ["run.json", "result.json", "error.json", "pid"])
def test_an_endless_or_deeply_nested_file_is_no_answer(
    made: ModuleType, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "evil"
    made.write(run / "events.ndjson", made.training(3))
    with open(run / name, "wb") as file:
        file.truncate(1 << 42)  # a hole of four terabytes
    assert in_time(lambda: read_json(run / name)) is None
    assert in_time(lambda: RunDir(run).summary()).step == 3
    (run / name).write_text("[" * 200_000)
    (run / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert read_json(run / name) is None and RunDir(run).summary().step == 3


AS_NOBODY = """
import os, sys
from pathlib import Path
from fluxtrain.events.run_folder.run_dir import list_runs
from fluxtui.sources.journal import JournalSource
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
root = Path(sys.argv[1])
print([run.run_id for run in list_runs(root)], JournalSource(root / "theirs").poll().link.problem)
"""


def test_a_run_that_is_not_ours_to_read_hides_no_other(made: ModuleType) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        for run in ("ours", "theirs"):
            made.write(root / run / "events.ndjson", made.training(3))
        (root / "theirs").chmod(0o000)
        code = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        told = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, name],
            env=code, capture_output=True, text=True, check=False,
        )  # fmt: skip
        (root / "theirs").chmod(0o755)
    if "ModuleNotFoundError" in told.stderr or "Permission denied" in told.stderr[-200:]:
        pytest.skip("another user cannot read the packages here")
    assert told.stdout.startswith("['ours']") and "Permission denied" in told.stdout, told.stderr


async def test_a_folder_of_runs_that_cannot_be_read_is_said(
    tmp_path: Path, app_pilot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(root: Path) -> list[Any]:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr("fluxtui.screens.runs.list_runs", refused)
    monkeypatch.setattr("fluxtui.screens.picker.list_runs", refused)
    app = FluxApp(None, start_screen="runs", runs_folder=tmp_path, sample_machine=False)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.until(pilot, lambda: "cannot be read: Permission" in app_pilot.text_of(app))
        app.push_screen(RunPicker(tmp_path, None))
        await app_pilot.until(pilot, lambda: "no other run" in app_pilot.text_of(app))


async def test_the_cursor_stays_on_its_run_when_a_newer_one_comes(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    def later(hours: int) -> list[Any]:
        return made.stamped(made.training(3), made.START_S + 3600 * hours)

    for hours, name in ((1, "first"), (2, "second")):
        made.write(tmp_path / name / "events.ndjson", later(hours))
    app = FluxApp(None, start_screen="runs", runs_folder=tmp_path, sample_machine=False)
    async with app.run_test(size=SIZE) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await app_pilot.until(pilot, lambda: len(screen.runs) == 2)
        await pilot.press("j")
        assert screen.selected is not None and screen.selected.run_id == "first"
        made.write(tmp_path / "third" / "events.ndjson", later(3))
        screen.look_again()
        await app_pilot.until(pilot, lambda: len(screen.runs) == 3)
        assert screen.selected.run_id == "first", "D and enter are for the run that was chosen"


def test_a_pipe_as_the_wizards_configuration_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    answers = Answers(start="file", config_path=str(tmp_path / "c.yaml"))
    assert "is no file" in in_time(lambda: check_start(answers)).error


# --- what a run's files say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"model": 3}, {"model": {"path": 7}}, {"data": {"path": [1]}}, {"train": {"steps": -1}},
        {"train": {"batch_rows": 1e308}}, {"method": {"name": "magic"}}, {"placement": []},
        {"data": {"sequence_length": {"a": 1}}}, {"model": None}, {"train": {"steps": True}},
    ],
)  # fmt: skip
def test_a_run_with_an_impossible_configuration_is_not_cloned(config: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="cannot be understood"):
        answers_from_run(config)


@pytest.mark.parametrize(
    "text",
    ['{"step": {"a": 1}}', '{"steps": -3}', "[1]", '{"overrides": "x"}', '{"a":' * 99_999, "nan"],
)
def test_a_hostile_draft_is_no_draft(tmp_path: Path, text: str) -> None:
    (tmp_path / "draft.json").write_text(text)
    assert load_draft(tmp_path / "draft.json") is None


async def test_an_answer_of_the_engine_that_makes_no_sense_is_a_refusal() -> None:
    changed: list[int] = []
    program = (sys.executable, "-c", """print('{"eta_s": [], "steps": 3}')""")
    question = Question(Any, DryRunAnswer, lambda: changed.append(1), program)  # type: ignore[arg-type]
    await question._run((), {})
    assert question.state.value is None and changed
    assert "cannot be understood" in (question.state.refusal or "")


def test_events_from_the_future_do_not_keep_a_silent_trainer_alive(made: ModuleType) -> None:
    events = made.training(10)
    events[-1] = msgspec.structs.replace(events[-1], wall_s=made.START_S + 10**9)
    state = FoldedRun().after_all(events)
    silent = View(state=state, link=Link(process="alive", quiet_s=60.0), wall_s=made.START_S + 60)
    assert silent.status.kind == "stalled" and silent.fresh(state.memory) is None


# --- the control socket ---------------------------------------------------------------------------


@contextlib.contextmanager
def trainer_that_says(path: Path, answer: bytes, forever: bool = False) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def talk() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(answer)
                while forever:
                    connection.sendall(answer)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        yield
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "answer",
    [b"garbage\n", b"\xff\xfe\n", b"{}\n", b'{"ok":1,"message":[]}\n', b"[" * 60_000 + b"\n",
     b'{"ok":true,"message":"x","y":' + b"[" * 60_000 + b"\n"],
)  # fmt: skip
def test_garbage_from_the_socket_is_an_error_in_words(tmp_path: Path, answer: bytes) -> None:
    with (
        trainer_that_says(tmp_path / "ctl.sock", answer),
        pytest.raises(NotReachable, match="cannot talk to the trainer"),
    ):
        send_command(tmp_path / "ctl.sock", "pause", timeout_s=60)


def test_an_answer_without_an_end_fills_no_memory(tmp_path: Path) -> None:
    with (
        trainer_that_says(tmp_path / "ctl.sock", b"x" * 65536, forever=True),
        pytest.raises(NotReachable, match="has no end"),
    ):
        send_command(tmp_path / "ctl.sock", "pause", timeout_s=60)
