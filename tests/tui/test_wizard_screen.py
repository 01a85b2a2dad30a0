"""The wizard driven by its keys: forward, back, errors in place, plan, draft, launch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from fluxtui.answers.answers import STEPS, Answers
from fluxtui.answers.draft import load_draft, save_draft
from fluxtui.wizard.screen import DraftOffer
from fluxtui.wizard.steps.paths import complete_path

Opened = Callable[..., AbstractAsyncContextManager[Any]]


async def test_enter_alone_starts_the_demo(folder: Path, opened: Opened) -> None:
    async with opened(folder) as wizard:
        for number, step in enumerate(STEPS, start=1):
            await wizard.until(lambda step=step: wizard.step == step)
            assert f"step {number} of 7" in wizard.text()
            await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)
        [launch] = wizard.app.ended_with
        assert launch is not None
        assert launch.arguments == ("--demo",)
        assert launch.run_dir.is_dir()
        assert load_draft(folder / "draft.json") is None, "a launched run leaves no draft"


async def test_escape_goes_back_and_loses_nothing(folder: Path, opened: Opened) -> None:
    data = folder / "tales.txt"
    data.write_text("Once upon a time.\n")
    async with opened(folder) as wizard:
        await wizard.go_to("data")
        await wizard.press("down")
        await wizard.write(str(data))
        await wizard.until(lambda: "Once upon a time." in wizard.text())
        await wizard.go_to("method")
        await wizard.press("escape", "escape")
        assert wizard.step == "model"
        await wizard.go_to("data")
        assert str(data)[-20:] in wizard.text()
        await wizard.press("up")
        assert wizard.screen.answers.data_file == "demo"
        await wizard.press("down")
        assert wizard.screen.answers.data_file == str(data), "another choice keeps what was typed"


async def test_escape_at_the_first_step_leaves_without_a_run(folder: Path, opened: Opened) -> None:
    async with opened(folder) as wizard:
        await wizard.press("escape")
        await wizard.until(lambda: wizard.app.ended_with)
        assert wizard.app.ended_with == [None]
        assert not (folder / "runs").exists()


async def test_an_answer_that_cannot_be_used_is_refused_in_place(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, Answers(step="model")) as wizard:
        await wizard.press("down", "down")
        await wizard.until(lambda: "type the path of a folder" in wizard.text())
        await wizard.press(*"/no/such", "enter")
        await wizard.until(lambda: "✗" in wizard.text())
        assert "/no/such does not exist" in wizard.text()
        assert wizard.step == "model"
        await wizard.press("shift+tab", "up", "up")
        assert wizard.screen.answers.model_source == "demo"
        await wizard.go_to("data")


async def test_the_plan_shows_every_choice_with_its_reason(folder: Path, opened: Opened) -> None:
    async with opened(folder, size=(80, 40)) as wizard:
        await wizard.go_to("strategy")
        await wizard.until(lambda: "Chosen for you: why?" in wizard.text())
        assert "1,024 tokens make a step" in wizard.text()
        assert "two chunks keep the device busy" not in wizard.text()
        await wizard.press("down")
        await wizard.until(lambda: "two chunks keep the device busy" in wizard.text())
        assert "1,024 tokens make a step" not in wizard.text()
        await wizard.press("w")
        await wizard.until(lambda: "1,024 tokens make a step" in wizard.text())
        assert "two chunks keep the device busy" in wizard.text()


async def test_the_wizard_stays_alive_while_the_engine_plans(folder: Path, opened: Opened) -> None:
    (folder / "hold").touch()
    async with opened(folder) as wizard:
        for step in ("model", "data", "method", "training", "strategy"):
            await wizard.press("enter")
            await wizard.until(lambda step=step: wizard.step == step)
        await wizard.until(lambda: "The engine reads the model" in wizard.text())
        await wizard.press("escape")
        assert wizard.step == "training", "keys work while the plan is made"
        await wizard.press("enter", "enter")
        await wizard.until(lambda: "goes on when the plan" in wizard.text())
        (folder / "hold").unlink()
        await wizard.until(lambda: wizard.step == "launch")
        plans = [asked for asked in wizard.asked() if asked[0] == "plan"]
        assert len(plans) == 1, "the same answers are planned once"


async def test_a_plan_that_is_refused_says_why_and_holds_the_wizard(
    folder: Path, opened: Opened
) -> None:
    plan = (folder / "plan.json").read_text()
    (folder / "plan.json").unlink()
    async with opened(folder, Answers(step="method")) as wizard:
        await wizard.until(lambda: "NOT KNOWN" in wizard.text())
        await wizard.press("enter", "enter")
        await wizard.until(lambda: "80 GiB" in wizard.text())
        await wizard.press("enter")
        assert wizard.step == "strategy"
        (folder / "plan.json").write_text(plan)
        await wizard.press("r")
        await wizard.until(lambda: "Chosen for you: why?" in wizard.text())


async def test_a_plan_over_the_limit_holds_the_wizard(folder: Path, opened: Opened) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "host_bytes": 2**40}))
    async with opened(folder, Answers(step="strategy")) as wizard:
        await wizard.until(lambda: "does not fit" in wizard.text())
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "strategy"


async def test_offload_and_steps_can_be_changed_and_are_planned_again(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder) as wizard:
        await wizard.go_to("strategy")
        await wizard.until(lambda: wizard.plan)
        await wizard.press("o")
        assert wizard.screen.answers.settings.get("placement.offload") == "none"
        await wizard.press("s", *"12", "enter")
        assert wizard.screen.answers.settings.get("train.steps") == 12
        assert wizard.step == "strategy", "Enter in the field closes the field only"
        await wizard.until(lambda: wizard.plan)
        await wizard.until(lambda: "train.steps=12" in wizard.asked()[-1])
        last = wizard.asked()[-1]
        assert last[:3] == ["plan", "--json", "--demo"]
        assert {"placement.offload=none", "train.steps=12"} <= set(last)
        await wizard.go_to("launch")
        await wizard.until(lambda: "▸ Enter starts" in wizard.text())


async def test_a_crash_loses_nothing_and_the_answers_are_offered(
    folder: Path, opened: Opened
) -> None:
    data = folder / "tales.txt"
    data.write_text("Once upon a time.\n")
    async with opened(folder) as wizard:
        await wizard.go_to("data")
        await wizard.press("down")
        await wizard.write(str(data))
        await wizard.pilot.pause()
    async with opened(folder) as wizard:  # the first one ended without a word
        assert isinstance(wizard.app.screen, DraftOffer)
        assert data.name in wizard.text()
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "data")
        assert wizard.screen.answers.data_file == str(data)


async def test_a_start_with_settings_for_a_cure_offers_the_draft_and_looking_keeps_it(
    folder: Path, opened: Opened
) -> None:
    save_draft(Answers(data_source="path", data_path="/d.csv", step="data"), folder / "draft.json")
    cure = Answers(overrides=("data.columns={output: response}",))
    for leave in (["escape", "escape"], ["enter"]):
        async with opened(folder, cure) as wizard:
            assert isinstance(wizard.app.screen, DraftOffer)
            await wizard.press(*leave)
            await wizard.pilot.pause()
    assert wizard.screen.answers.data_path == "/d.csv"
    assert wizard.screen.answers.overrides == cure.overrides


async def test_answers_from_flags_are_not_asked_about_a_draft(folder: Path, opened: Opened) -> None:
    save_draft(Answers(settings={"placement.offload": "max"}), folder / "draft.json")
    async with opened(folder, Answers(settings={"train.steps": 4})) as wizard:
        assert not isinstance(wizard.app.screen, DraftOffer)
        assert wizard.screen.answers.settings.get("train.steps") == 4


async def test_a_run_folder_that_cannot_be_written_is_told_at_the_launch(
    folder: Path, opened: Opened
) -> None:
    (folder / "runs").write_text("a file in the way")
    async with opened(folder) as wizard:
        await wizard.go_to("launch")
        await wizard.press("enter")
        await wizard.until(lambda: "✗" in wizard.text())
        assert not wizard.app.ended_with
        (folder / "runs").unlink()
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with)


async def test_the_launch_shows_command_and_yaml(folder: Path, opened: Opened) -> None:
    data = folder / "tales.txt"
    data.write_text("Once upon a time.\n")
    answers = Answers(data_source="path", data_path=str(data), step="strategy")
    async with opened(folder, answers, size=(120, 40)) as wizard:
        await wizard.go_to("launch")
        assert "fluxtrain train" in wizard.text() and "model.path=demo" in wizard.text()
        assert "path: demo" in wizard.text()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 20), (200, 60)])
@pytest.mark.thinned(2)
async def test_every_step_draws_in_every_size(
    folder: Path, opened: Opened, size: tuple[int, int]
) -> None:
    async with opened(folder, size=size) as wizard:
        for step in STEPS:
            await wizard.go_to(step)
            lines = wizard.text().splitlines()
            assert len(lines) == size[1]
            above = 0 if size[1] < 30 else 1
            assert f"step {STEPS.index(step) + 1} of 7" in lines[above]
            assert "enter" in lines[-1]


async def test_a_click_chooses(folder: Path, opened: Opened) -> None:
    async with opened(folder, Answers(step="model")) as wizard:
        await wizard.pilot.click("#model-choices", offset=(4, 3))
        assert wizard.screen.answers.model_source == "hub"


def test_a_path_is_completed_to_the_first_match(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "modem.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    assert complete_path(f"{tmp_path}/mod", folders_only=False) == f"{tmp_path}/models/"
    assert complete_path(f"{tmp_path}/mode", folders_only=True) == f"{tmp_path}/models/"
    assert complete_path(f"{tmp_path}/modem", folders_only=True) is None
    assert complete_path(f"{tmp_path}/", folders_only=True) == f"{tmp_path}/models/"
    assert complete_path(f"{tmp_path}/.h", folders_only=True) == f"{tmp_path}/.hidden/"
    assert complete_path("", folders_only=False) is None
    assert complete_path(f"{tmp_path}/no/x", folders_only=False) is None


async def test_an_offered_draft_can_be_left_and_does_not_come_back(
    folder: Path, opened: Opened
) -> None:
    save_draft(Answers(settings={"placement.offload": "max"}), folder / "draft.json")
    async with opened(folder) as wizard:
        await wizard.press("n")
        await wizard.pilot.pause()
        assert wizard.screen.answers.settings.get("placement.offload") is None
        assert load_draft(folder / "draft.json") is None
