"""Pages that the engine fills: data, machine, strategy, preview with its dry run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fluxtrain.events.answers.asking import EngineRefused
from fluxtrain.events.answers.plan import distinct_plans
from fluxtui.answers.answers import Answers
from fluxtui.wizard.engine.plan_preview import dial_settings, with_settings_of_the_dial

Opened = Callable[..., AbstractAsyncContextManager[Any]]


def asked(wizard: Any, command: str) -> list[list[str]]:
    return [line for line in wizard.asked() if line[0] == command]


async def test_the_machine_is_measured_alone_before_anything_is_planned(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, Answers(step="strategy")) as wizard:
        await wizard.until(lambda: wizard.plan)
        assert wizard.asked()[0][0] == "probe"


async def test_m_measures_the_machine_again(folder: Path, opened: Opened) -> None:
    async with opened(folder, Answers(step="strategy")) as wizard:
        await wizard.until(lambda: wizard.screen.background.probe.state.value and wizard.plan)
        probe = json.loads((folder / "probe.json").read_text())
        probe["rates"]["host_copy"]["per_s"] = 2e10
        (folder / "probe.json").write_text(json.dumps(probe))
        await wizard.press("m")
        value = wizard.screen.background.probe
        await wizard.until(lambda: value.state.value and value.state.value.rate("host_copy") > 1e10)
        assert "--fresh" in asked(wizard, "probe")[-1]
        await wizard.until(lambda: len(asked(wizard, "plan")) == 2), "and the plan is made anew"


async def test_a_machine_that_cannot_be_measured_is_told_and_the_plan_is_asked_for(
    folder: Path, opened: Opened
) -> None:
    (folder / "probe.json").unlink()
    async with opened(folder, Answers(step="strategy")) as wizard:
        await wizard.until(lambda: wizard.screen.background.probe.state.refusal)
        await wizard.until(lambda: wizard.plan)


async def test_data_that_the_engine_refuses_holds_the_wizard(folder: Path, opened: Opened) -> None:
    (folder / "inspect.json").unlink()
    (folder / "engine.py").write_text(
        (folder / "engine.py").read_text().replace(
            'sys.exit("error: the', 'print("error: no chat template", file=sys.stderr)\n'
            '    sys.exit(2 if sys.argv[1] == "inspect" else "error: the'
        )
    )  # fmt: skip
    async with opened(folder, Answers(step="data")) as wizard:
        await wizard.until(lambda: "✗ no chat template" in wizard.text())
        await wizard.press("enter")
        await wizard.pilot.pause()
        assert wizard.step == "data"


async def test_an_inspection_that_failed_is_no_reason_to_stop(folder: Path, opened: Opened) -> None:
    (folder / "inspect.json").unlink()
    async with opened(folder, Answers(step="data")) as wizard:
        await wizard.until(lambda: "✗" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "method")


async def test_a_data_set_on_the_hub_is_a_path_that_the_engine_fetches(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, Answers(step="data")) as wizard:
        await wizard.press("down", "down")
        await wizard.until(lambda: "type an id such as" in wizard.text())
        await wizard.press(*"owner/tales")
        await wizard.until(lambda: "✓ place" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "method" and wizard.plan)
        await wizard.go_to("launch")
        await wizard.press("y")
        assert "path: hf://datasets/owner/tales" in wizard.app.clipboard


async def test_the_dial_takes_the_settings_of_a_ranked_plan_and_keeps_the_cards(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, Answers(step="strategy"), size=(92, 40)) as wizard:
        await wizard.until(lambda: wizard.plan)
        await wizard.press("right", "right", "right", "right")
        await wizard.until(lambda: "▸ fit" in wizard.text())
        await wizard.until(lambda: len(asked(wizard, "plan")) >= 2 and wizard.plan)
        last = asked(wizard, "plan")[-1]
        assert {"placement.offload=max", "placement.chunk_rows=1"} <= set(last)
        for name in ("fast", "balanced"):
            assert name in wizard.text(), "the other cards stay to be chosen"
        await wizard.press("c", "3", "enter")
        await wizard.until(lambda: "placement.chunk_rows=3" in asked(wizard, "plan")[-1])
        assert "planned before the numbers below were set" in wizard.text()
        await wizard.press("left", "left", "left")
        await wizard.until(lambda: "‹ auto ›" in wizard.text())
        assert wizard.screen.answers.dial_settings == {}


async def test_a_dial_from_the_command_line_is_turned_when_the_plans_are_there(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, Answers(step="strategy", dial="balanced")) as wizard:
        await wizard.until(lambda: wizard.screen.answers.dial_settings)
        await wizard.until(lambda: "placement.chunk_rows=2" in asked(wizard, "plan")[-1])


def test_the_trainers_own_dial_decides_about_the_offload(wizard_pilot: ModuleType) -> None:
    [fast, *_] = wizard_pilot.planned().plans
    assert dial_settings([fast], "fast")["placement.offload"] == "weights"
    own = msgspec.structs.replace(fast, settings={"placement.aggressiveness": "fast"})
    assert dial_settings([own], "fast") == {"placement.aggressiveness": "fast"}
    assert dial_settings([own], "auto") == {}


def test_a_dial_without_a_wizard_asks_for_the_plan(folder: Path) -> None:

    engine = (sys.executable, str(folder / "engine.py"))
    answers = with_settings_of_the_dial(Answers(dial="fit"), engine)
    assert answers.dial_settings["placement.chunk_rows"] == 1
    assert with_settings_of_the_dial(Answers(), engine) == Answers()
    (folder / "plan.json").unlink()
    with pytest.raises(EngineRefused):
        with_settings_of_the_dial(Answers(dial="fit"), engine)


async def test_a_dry_run_shows_measured_and_is_of_these_answers_only(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, Answers(step="launch"), size=(80, 40)) as wizard:
        await wizard.until(lambda: "starts the training" in wizard.text() and wizard.plan)
        await wizard.press("t")
        await wizard.until(lambda: "-50%" in wizard.text())
        assert "200 steps take 1m 30s to 2m 00s" in wizard.text()
        await wizard.press("escape", "c", "2", "enter", "enter")
        await wizard.until(lambda: wizard.step == "launch")
        assert "predicted " not in wizard.text(), "it was of other answers"


async def test_a_dry_run_can_be_ended_and_leaves_nothing(folder: Path, opened: Opened) -> None:
    (folder / "hold-trial").touch()
    async with opened(folder, Answers(step="launch"), size=(80, 40)) as wizard:
        await wizard.until(lambda: "starts the training" in wizard.text() and wizard.plan)
        await wizard.press("t")
        await wizard.until(lambda: "step 1/3" in wizard.text()), "its progress is shown"
        assert "end the dry run" in wizard.text()
        await wizard.press("escape")
        await wizard.until(lambda: "Training three steps" not in wizard.text())
        assert wizard.step == "launch", "escape ended the dry run and no more"
        assert not (folder / "runs").exists(), "the runs' folder was never touched"
        await wizard.press("escape")
        assert wizard.step == "strategy"


async def test_a_dry_run_that_fails_says_why(folder: Path, opened: Opened) -> None:
    (folder / "dry-run.json").unlink()
    async with opened(folder, Answers(step="launch"), size=(80, 40)) as wizard:
        await wizard.until(lambda: "starts the training" in wizard.text() and wizard.plan)
        await wizard.press("t")
        await wizard.until(lambda: "✗ the model needs 80 GiB" in wizard.text())
        await wizard.press("enter")
        await wizard.until(lambda: wizard.app.ended_with), "the user decides"


async def test_command_and_yaml_are_copied(folder: Path, opened: Opened) -> None:
    async with opened(folder, Answers(settings={"train.steps": 5}, step="launch")) as wizard:
        await wizard.until(lambda: "starts the training" in wizard.text() and wizard.plan)
        await wizard.press("m")
        assert wizard.app.clipboard == "fluxtrain train --demo --set train.steps=5"
        await wizard.press("y")
        assert "path: demo" in wizard.app.clipboard


def test_stops_with_one_layout_are_joined_and_others_stand_alone(wizard_pilot: ModuleType) -> None:
    fast, *_ = wizard_pilot.planned().plans
    balanced = msgspec.structs.replace(fast, name="balanced")
    smaller = msgspec.structs.replace(fast.layout, resident_blocks=fast.layout.resident_blocks + 1)
    fit = msgspec.structs.replace(fast, name="fit", layout=smaller)
    assert distinct_plans([fast, balanced, fit]) == {"fast = balanced": balanced, "fit": fit}
    assert list(distinct_plans([fast, fit, balanced])) == ["fast", "fit", "balanced"]
