"""The wizard's first page: a new run, one to go on with, one to watch, a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from fluxtui.answers.answers import Answers
from fluxtui.answers.draft import load_draft, save_draft
from fluxtui.answers.launching import Attach
from fluxtui.wizard.checks.known_runs import (
    recent_models,
    run_option,
    runs_to_resume,
    runs_to_watch,
)
from fluxtui.wizard.steps.widgets import ChoiceList

Opened = Callable[..., AbstractAsyncContextManager[Any]]


def make_run(root: Path, name: str, code: int | None = None, model: str = "demo") -> RunDir:
    """A run that ended with `code`, or died."""
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    run.run.write_text(json.dumps({"config": {"model": {"path": model}}}))
    run.journal.write_text("")
    if code is not None:
        run.result.write_text(json.dumps({"exit_code": code, "message": ""}))
    return run


@pytest.fixture
def runs(folder: Path) -> Path:
    """A finished run, an interrupted one, one that died, and one that was refused."""
    root = folder / "runs"
    make_run(root, "20260101-done", 0)
    make_run(root, "20260102-stopped", 130)
    make_run(root, "20260103-died")
    refused = make_run(root, "20251231-refused")
    refused.error.write_text(json.dumps({"exit_code": 2, "refused": True, "message": "no file"}))
    return root


def test_only_runs_that_ended_early_can_be_gone_on_with(runs: Path) -> None:
    found = list_runs(runs)
    assert {run.run_id for run in runs_to_resume(found)} == {"20260102-stopped", "20260103-died"}
    assert len(runs_to_watch(found)) == 4
    states = {run.run_id: run_option(run).text for run in found}
    assert states["20260102-stopped"].startswith("stopped, step -")


def test_recent_models_are_told_once_and_only_while_they_are_there(
    folder: Path, tmp_path: Path
) -> None:
    root, mine = folder / "runs", tmp_path / "mine"
    mine.mkdir()
    for number, model in enumerate([str(mine), "o/n", "demo", str(mine), "/gone", "o/n"]):
        make_run(root, f"run-{number}", 0, model)
    (make_run(root, "broken").run).write_text("{")
    assert sorted(recent_models(list_runs(root))) == sorted([str(mine), "o/n"])


async def test_going_on_with_a_run_is_two_pages_and_its_own_command(
    folder: Path, runs: Path, opened: Opened
) -> None:
    async with opened(folder) as wizard:
        await wizard.until(lambda: wizard.screen.runs)
        await wizard.press("down", "tab", "down")
        chosen = wizard.screen.answers.resume_run
        await wizard.until(lambda: "✓ run" in wizard.text())
        assert "step 1 of 2" in wizard.text()
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "launch")
        assert "Enter goes on with the run" in wizard.text()
        assert "--resume" in wizard.text()
        await wizard.press("escape")
        assert wizard.step == "start"
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "launch")
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)
        [launch] = wizard.app.ended_with
        assert launch.arguments == ("--resume", chosen)
        assert launch.run_dir == Path(chosen)
        assert len(list(runs.iterdir())) == 4, "no new directory"


async def test_enter_on_attach_watches_the_first_run_of_the_list(
    folder: Path, runs: Path, opened: Opened
) -> None:
    async with opened(folder) as wizard:
        await wizard.until(lambda: wizard.screen.runs)
        await wizard.press("down", "down")
        await wizard.until(lambda: "✓ run" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)
        [outcome] = wizard.app.ended_with
        assert isinstance(outcome, Attach)
        assert outcome.run_dir.parent == runs
        assert load_draft(folder / "draft.json") is None


@pytest.mark.parametrize("down", [1, 2])
async def test_without_runs_there_is_nothing_to_choose_and_enter_stays(
    folder: Path, opened: Opened, down: int
) -> None:
    async with opened(folder) as wizard:
        await wizard.press(*["down"] * down)
        await wizard.until(lambda: "nothing to choose from" in wizard.text())
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "start"
        assert not wizard.app.ended_with


async def test_a_run_that_finished_meanwhile_is_not_gone_on_with(
    folder: Path, runs: Path, opened: Opened
) -> None:
    done = str(runs / "20260101-done")
    async with opened(folder, Answers(start="resume", resume_run=done)) as wizard:
        await wizard.until(lambda: "20260101-done is finished" in wizard.text())
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "start"


async def test_a_configuration_is_opened_and_its_other_settings_are_kept(
    folder: Path, opened: Opened
) -> None:
    config = folder / "tales.yaml"
    config.write_text("data: {sequence_length: 64}\ntrain: {steps: 9, seed: 3}\n")
    async with opened(folder) as wizard:
        await wizard.press("down", "down", "down", "enter")
        assert isinstance(wizard.app.focused, Input)
        await wizard.write(str(config))
        await wizard.until(lambda: "✓ model" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "strategy")
        answers = wizard.screen.answers
        assert answers.settings["train.steps"] == 9 and answers.settings["train.seed"] == 3
        assert answers.settings["data.sequence_length"] == 64
        await wizard.press("s", "backspace", "7", "enter", *["escape"] * 5)
        assert wizard.step == "start"
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "strategy")
        assert wizard.screen.answers.settings.get("train.steps") == 7, (
            "the same file is not read over what was changed"
        )


@pytest.mark.parametrize(
    ("text", "said"), [("modle: {}\n", "modle"), ("a: [\n", "YAML"), (None, "does not exist")]
)
async def test_a_bad_configuration_is_told_in_place(
    folder: Path, opened: Opened, text: str | None, said: str
) -> None:
    config = folder / "c.yaml"
    if text is not None:
        config.write_text(text)
    answers = Answers(start="file", config_path=str(config))
    async with opened(folder, answers) as wizard:
        await wizard.until(lambda: "✗" in wizard.text())
        assert said in " ".join(wizard.text().split()) or text is None
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "start"


async def test_a_new_run_after_a_file_does_not_keep_the_files_settings(
    folder: Path, opened: Opened
) -> None:
    config = folder / "tales.yaml"
    config.write_text("train: {seed: 3}\n")
    answers = Answers(start="file", config_path=str(config), loaded_from=str(config),
                      base={"train": {"seed": 3}})  # fmt: skip
    async with opened(folder, answers) as wizard:
        await wizard.press("up", "up", "up", "enter")
        await wizard.until(lambda: wizard.step == "model")
        assert wizard.screen.answers.base == {}


async def test_a_recent_model_can_be_chosen(folder: Path, opened: Opened) -> None:
    mine = folder / "mine"
    mine.mkdir()
    make_run(folder / "runs", "run-1", 0, str(mine))
    async with opened(folder, Answers(step="model")) as wizard:
        await wizard.until(lambda: wizard.screen.runs)
        await wizard.press("down")
        await wizard.until(lambda: wizard.screen.answers.model_path == str(mine))
        await wizard.until(lambda: "✗" in wizard.text())
        assert "no config.json" in " ".join(wizard.text().split()), "it is checked like a folder"


async def test_an_answer_that_is_heard_after_its_page_was_left_brings_it_back(
    runs: Path, folder: Path, opened: Opened
) -> None:
    async with opened(folder) as wizard:
        await wizard.until(lambda: wizard.screen.runs)
        wizard.screen.query_one("#start-choices", ChoiceList).action_move(1)
        wizard.screen.action_next()  # as fast as a terminal can send both keys
        assert wizard.step == "model", "the choice has not been heard"
        await wizard.until(lambda: wizard.screen.answers.start == "resume")
        assert wizard.step == "start" and "go on with a run" in wizard.text()
        assert load_draft(folder / "draft.json") == wizard.screen.answers
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "launch")


def test_a_draft_of_a_page_that_its_answers_do_not_lead_to_begins_at_the_start(
    tmp_path: Path,
) -> None:
    save_draft(Answers(start="resume", resume_run="r", step="model"), tmp_path / "draft.json")
    assert load_draft(tmp_path / "draft.json") == Answers(start="resume", resume_run="r")
