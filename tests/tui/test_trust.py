"""Whether a model's own code may run is asked of the user, whatever the run's folder says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtui.answers.answers import Answers
from fluxtui.answers.configuring import configuration
from fluxtui.answers.draft import answers_from_run
from fluxtui.answers.launching import prepare
from fluxtui.screens.dialogs import QuestionDialog
from fluxtui.screens.runs import RunsScreen
from fluxtui.sources.trust import TRUST, trusts_code

SIZE = (120, 40)
MODEL = "someone/odd-model"


def a_run(folder: Path, made: ModuleType, trusts: object) -> Path:
    made.write(folder / "events.ndjson", made.failed())
    config = {
        "model": {"path": MODEL, "trust_remote_code": trusts},
        "data": {"path": "demo"},
        "train": {"steps": 77},
    }
    (folder / "run.json").write_text(json.dumps({"config": config}))
    return folder


@pytest.mark.parametrize("trusts", [True, False, "yes", None])
def test_a_run_tells_which_code_it_wants_to_run(
    tmp_path: Path, made: ModuleType, trusts: object
) -> None:
    folder = a_run(tmp_path / "run", made, trusts)
    assert trusts_code(folder) == (MODEL if trusts else "")
    answers = Answers(start="resume", resume_run=str(folder))
    shown = prepare(answers, was_shown=True)
    assert shown.arguments == ("--resume", str(folder), *(TRUST if trusts else ()))
    assert prepare(answers).arguments == ("--resume", str(folder)), "nobody was asked"
    (folder / "run.json").write_text("[]")
    assert trusts_code(folder) == ""


def test_a_clone_of_a_run_does_not_trust_for_the_user(tmp_path: Path, made: ModuleType) -> None:
    config = json.loads((a_run(tmp_path / "run", made, True) / "run.json").read_text())["config"]
    cloned = configuration(answers_from_run(config))
    assert cloned["model"] == {"path": MODEL}
    assert config["model"]["trust_remote_code"] is True, "the record itself is not changed"


@pytest.mark.parametrize("trusts", [True, False])
async def test_resuming_asks_before_code_runs_and_says_so_to_the_trainer(
    tmp_path: Path,
    made: ModuleType,
    app_pilot: Any,
    monkeypatch: pytest.MonkeyPatch,
    trusts: bool,
) -> None:
    begun: list[tuple[str, ...]] = []

    def start(arguments: tuple[str, ...], run_dir: str) -> None:
        begun.append(arguments)
        raise OSError("not in a test")

    monkeypatch.setattr("fluxtrain.events.run_folder.launch.start_trainer", start)
    made.write(tmp_path / "runs" / "ours" / "events.ndjson", made.training(80))
    foreign = a_run(tmp_path / "runs" / "foreign", made, trusts)
    app = app_pilot.app_on(tmp_path / "runs" / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await app_pilot.until(pilot, lambda: len(screen.runs) == 2)
        while screen.selected is None or screen.selected.path != str(foreign):
            await pilot.press("down" if screen.runs[0].path != str(foreign) else "up")
        await pilot.press("r")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, QuestionDialog))
        told = " ".join(str(one.render()) for one in app.screen.query("Static"))
        assert (f"runs Python code that comes with {MODEL}" in told) is trusts
        await pilot.press("y")
        await app_pilot.until(pilot, lambda: bool(begun))
    assert begun == [("--resume", "auto", *(TRUST if trusts else ()))]
