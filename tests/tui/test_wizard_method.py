"""The page of the method: three cards, live, and the questions about adapters."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.config.schema import demo_config, validate
from fluxtrain.errors import EXIT_DOES_NOT_FIT
from fluxtui.answers.answers import METHODS, Answers
from fluxtui.answers.configuring import (
    answers_from_config,
    configuration,
    set_arguments,
)
from fluxtui.answers.draft import load_draft, save_draft
from fluxtui.answers.questions import GIVES_UP
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.pages.method import method_page
from fluxtui.wizard.pages.wizard_view import WizardView

ADAPTERS = Answers(
    method="qlora", rank=8, alpha=64, targets="q_proj, v_proj", variant="dora", base_format="int8"
)


def plan_of(wizard_pilot: ModuleType, name: str, **changes: Any) -> Asked[Any]:
    method = {**wizard_pilot.PLAN["method"], "name": name}
    return Asked(value=wizard_pilot.planned(method=method, **changes))


def shown(view: WizardView, width: int = 76) -> str:
    text = method_page(view, width).plain
    assert max(map(len, text.split("\n"))) <= width
    return text


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [56, 76, 92])
def test_each_method_has_its_own_verdict(wizard_pilot: ModuleType, width: int) -> None:
    gpu = {"device": "cuda", "device_budget_bytes": 24 << 30}
    offloaded = {**wizard_pilot.LAYOUT, "offload": "weights"}
    view = WizardView(
        answers=Answers(method="lora"),
        plan=plan_of(wizard_pilot, "lora", **gpu, layout=offloaded, device_bytes=20 << 30),
        methods={
            "full": Asked(refusal="the model needs 80 GiB", exit_code=EXIT_DOES_NOT_FIT),
            "qlora": plan_of(wizard_pilot, "qlora", **gpu, device_bytes=9 << 30),
        },
    )
    text = shown(view, width)
    assert "✗ DOES NOT FIT" in text and "✓ FITS WITH OFFLOAD" in text
    assert "20.0 GiB" in text and "9.00 GiB" in text
    assert "the model needs 80 GiB" not in text, "of the chosen method alone"
    for method in METHODS:
        assert GIVES_UP[method][: width - 12] in text


def test_a_method_that_is_not_planned_yet_says_so(wizard_pilot: ModuleType) -> None:
    view = WizardView(
        plan=plan_of(wizard_pilot, "full"), methods={"lora": Asked(asked_s=time.monotonic())}
    )
    text = shown(view)
    assert "being planned" in text and "waits" in text


@pytest.mark.parametrize(("method", "asked"), [("full", 0), ("lora", 4), ("qlora", 5)], ids=str)
def test_only_questions_that_a_method_has_are_shown(
    wizard_pilot: ModuleType, method: Any, asked: int
) -> None:
    view = WizardView(answers=Answers(method=method), plan=plan_of(wizard_pilot, method))
    lines = shown(view, 92).split("\n")
    assert sum(line[:2] in ("n ", "a ", "t ", "v ", "b ") for line in lines) == asked
    assert any("all linear" in line for line in lines) == (asked > 0)


# --- its keys -------------------------------------------------------------------------------------


def asked_methods(wizard: Any) -> list[str]:
    found = []
    for call in wizard.asked():
        if call[0] == "plan":
            named = [one for one in call if one.startswith("method.name=")]
            found.append(named[0].partition("=")[2] if named else "full")
    return found


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_all_methods_are_planned_and_a_chosen_one_is_not_planned_again(
    folder: Path, opened: Any, size: tuple[int, int]
) -> None:
    async with opened(folder, Answers(step="method"), size) as wizard:
        await wizard.until(lambda: wizard.text().count("✓ FITS") == 3)
        assert asked_methods(wizard) == ["full", "lora", "qlora"]
        await wizard.press("right", "right")
        await wizard.until(lambda: wizard.screen.answers.method == "qlora" and wizard.plan)
        assert "▸ QLoRA" in wizard.text() and "nf4-double" in wizard.text()
        await wizard.press("right")
        assert wizard.screen.answers.method == "qlora", "the ends hold"
        assert asked_methods(wizard) == ["full", "lora", "qlora"], "its plan was there"


async def test_letters_set_what_belongs_to_adapters(folder: Path, opened: Any) -> None:
    async with opened(folder, Answers(step="method", method="qlora")) as wizard:
        await wizard.until(lambda: wizard.plan)
        await wizard.press("n", *"32", "enter")
        await wizard.press("t", *"q_proj", "enter")
        await wizard.press("v", "b")
        await wizard.until(lambda: wizard.screen.answers.base_format == "int8")
        answers = wizard.screen.answers
        assert (answers.rank, answers.targets, answers.variant) == (32, "q_proj", "rslora")
        await wizard.press("n", "escape")
        assert wizard.step == "method" and wizard.screen.answers.rank == 32
        await wizard.press("left", "left", "n", "b")
        await wizard.until(lambda: wizard.screen.answers.method == "full")
        assert wizard.screen.answers.base_format == "int8", "full training has no such question"
        assert not wizard.screen.current.asks_for_a_number


async def test_the_page_that_is_left_ends_the_comparison(folder: Path, opened: Any) -> None:
    async with opened(folder, Answers(step="method")) as wizard:
        await wizard.until(lambda: wizard.plan)
        (folder / "hold").touch()
        await wizard.until(lambda: "lora" in asked_methods(wizard))
        await wizard.press("enter")
        await wizard.until(lambda: wizard.step == "training")
        assert not wizard.screen.background.beside.state.pending
        (folder / "hold").unlink()


# --- the answers ----------------------------------------------------------------------------------


def test_answers_about_adapters_become_the_configuration_and_come_back() -> None:
    config = configuration(ADAPTERS)
    method = validate({**config, "data": {"path": "demo"}}, "here").method
    assert (method.name, method.rank, method.alpha) == ("qlora", 8, 64)
    assert (method.targets, method.variant, method.base) == (["q_proj", "v_proj"], "dora", "int8")
    back = answers_from_config(config)
    assert configuration(back) == config
    assert (back.rank, back.targets, back.base_format) == (8, "q_proj, v_proj", "int8")


def test_a_demo_is_started_with_its_method() -> None:
    told = [one for one in set_arguments(ADAPTERS) if one != "--set"]
    method = demo_config(told).method
    assert (method.name, method.rank, method.targets) == ("qlora", 8, ["q_proj", "v_proj"])
    assert set_arguments(Answers()) == []


def test_full_training_drops_what_a_file_said_of_adapters() -> None:
    base = {"method": {"name": "qlora", "rank": 4, "dropout": 0.1}}
    answers = answers_from_config({**base, "model": {"path": "m"}, "data": {"path": "d"}})
    assert configuration(answers)["method"] == {"name": "qlora", "rank": 4, "dropout": 0.1}
    full = configuration(replace(answers, method="full"))
    assert full["method"] == {"name": "full", "dropout": 0.1}


def test_answers_about_adapters_survive_a_crash(tmp_path: Path) -> None:
    place = tmp_path / "draft.json"
    save_draft(ADAPTERS, place)
    assert load_draft(place) == ADAPTERS
    fields = json.loads(place.read_text())
    for name, wrong in (("rank", 0), ("variant", "pissa"), ("base_format", 4), ("targets", [1])):
        place.write_text(json.dumps({**fields, name: wrong}))
        assert load_draft(place) is None
