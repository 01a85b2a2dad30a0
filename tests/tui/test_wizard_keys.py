"""The wizard's keys are the registry's: key map, footer, help, palette and other keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fluxtui.actions.key_map import rebound
from fluxtui.actions.table import ACTIONS, PAGES
from fluxtui.answers.answers import STEPS, Answers
from fluxtui.answers.launching import Launch
from fluxtui.answers.rows import StepName, rows_of
from fluxtui.app import FluxApp
from fluxtui.screens.dialogs import HelpScreen, help_lines
from fluxtui.settings import load_settings
from fluxtui.wizard.frame import HINTS, key_hints
from fluxtui.wizard.screen import WizardScreen

SIZE = (120, 40)
NO_ROOM = {  # their pages name the keys where they are needed
    ("training", "wizard_complete"),
    ("strategy", "wizard_measure"),
    *(("method", row.action) for row in rows_of("method", "qlora")),
}


def wizard_in(folder: Path, pilot_module: Any, step: Any, **keys: str) -> tuple[FluxApp, Any]:
    """The wizard at a step, in the real app, with the user's own keys."""
    import sys

    screen = WizardScreen(
        Answers(step=step), folder / "runs", draft=folder / "draft.json",
        engine=(sys.executable, str(folder / "engine.py")),
    )  # fmt: skip
    app = FluxApp(
        start_screen="wizard", sample_machine=False, make_wizard=lambda: screen,
        runs_folder=folder / "runs",
    )  # fmt: skip
    app.settings = dataclasses.replace(app.settings, keys=keys)
    app.actions = rebound(keys)
    return app, screen


def offload(wizard: Any) -> object:
    return wizard.answers.settings.get("placement.offload")


def test_the_pages_of_the_registry_are_the_wizards_steps() -> None:
    assert tuple(f"wizard.{step}" for step in STEPS) == PAGES and set(HINTS) == set(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_every_action_of_a_page_is_in_its_footer_and_its_help(step: StepName) -> None:
    shown = {name for names, _ in HINTS[step] for name in names}
    here = [action for action in ACTIONS if action.works_on(f"wizard.{step}")]
    helped = "\n".join(
        "".join(t for t, _ in spans) for spans in help_lines(ACTIONS, f"wizard.{step}", ())
    )
    for action in here:
        assert action.about in helped
        if action.in_wizard and step != "launch" and (step, action.id) not in NO_ROOM:
            assert action.id in shown, action.id
    assert "Stop the run" not in helped and "whole run at a glance" not in helped


def test_the_footer_shows_the_users_own_keys() -> None:
    hints = key_hints("strategy", rebound({"wizard_batch": "B", "wizard_why": "f7"}))
    assert ("B c s o", "change") in hints and ("f7", "why") in hints
    assert ("enter", "next") in hints and ("esc", "back") in hints
    assert ("f1", "help") in key_hints("data", ACTIONS), "a question mark is part of a path there"
    assert ("?", "help") in key_hints("launch", ACTIONS)


async def test_a_page_takes_other_keys_and_the_old_ones_are_free(
    folder: Path, wizard_pilot: Any, app_pilot: Any
) -> None:
    app, wizard = wizard_in(folder, wizard_pilot, "strategy", wizard_offload="O", wizard_next="f8")
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.until(pilot, lambda: app.screen is wizard)
        await app_pilot.until(pilot, lambda: wizard.background.plan.state.value)
        before = offload(wizard)
        await pilot.press("o")
        assert offload(wizard) == before
        await pilot.press("O")
        await app_pilot.until(pilot, lambda: offload(wizard) != before)
        await app_pilot.until(pilot, lambda: "b c s O" in app_pilot.text_of(app))
        await app_pilot.until(pilot, lambda: "O offload" in app_pilot.text_of(app))
        await app_pilot.until(pilot, lambda: wizard.background.plan.state.value)
        await pilot.press("enter")
        assert wizard.answers.step == "strategy"
        await pilot.press("f8")
        await app_pilot.until(pilot, lambda: wizard.answers.step == "launch")


@pytest.mark.parametrize(("step", "key"), [("data", "f1"), ("strategy", "question_mark")])
async def test_help_tells_the_keys_of_the_page(
    folder: Path, wizard_pilot: Any, app_pilot: Any, step: str, key: str
) -> None:
    app, wizard = wizard_in(folder, wizard_pilot, step)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.until(pilot, lambda: app.screen is wizard)
        await pilot.press(key)
        await app_pilot.until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await app_pilot.until(pilot, lambda: "Accept the answer" in app_pilot.text_of(app))
        assert ("Set the rows of a batch" in app_pilot.text_of(app)) is (step == "strategy")
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: app.screen is wizard)
        assert wizard.answers.step == step


async def test_letters_of_a_path_are_no_keys(
    folder: Path, wizard_pilot: Any, app_pilot: Any
) -> None:
    app, wizard = wizard_in(folder, wizard_pilot, "data")
    wizard.answers = dataclasses.replace(wizard.answers, data_source="path")
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.until(pilot, lambda: app.screen is wizard)
        await pilot.press(*"/r?:")
        await app_pilot.until(pilot, lambda: wizard.answers.data_path == "/r?:")
        assert app.screen is wizard


async def test_the_palette_runs_the_actions_of_the_page(
    folder: Path, wizard_pilot: Any, app_pilot: Any
) -> None:
    app, wizard = wizard_in(folder, wizard_pilot, "strategy")
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.until(pilot, lambda: app.screen is wizard)
        await app_pilot.until(pilot, lambda: wizard.background.plan.state.value)
        before = offload(wizard)
        await pilot.press("ctrl+p")
        await app_pilot.until(pilot, lambda: "CommandPalette" in type(app.screen).__name__)
        await app_pilot.until(pilot, lambda: "Set the rows of a batch" in app_pilot.text_of(app))
        assert "Write a checkpoint" not in app_pilot.text_of(app)
        await pilot.press(*"next offload")
        await app_pilot.until(pilot, lambda: "Set the rows" not in app_pilot.text_of(app))
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: offload(wizard) != before)
        assert app.screen is wizard


async def test_keys_of_a_run_do_nothing_in_the_wizard(
    folder: Path, wizard_pilot: Any, app_pilot: Any
) -> None:
    app, wizard = wizard_in(folder, wizard_pilot, "strategy")
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.until(pilot, lambda: app.screen is wizard)
        theme = app.theme
        await pilot.press("1", "t", "Q", "d", "q", "x", "S", "n")
        await pilot.pause()
        assert app.screen is wizard and app.is_running and app.theme == theme
        assert app_pilot.notes(app) == [] and not isinstance(wizard, Launch)


def test_a_key_may_be_shared_by_a_page_and_a_screen_but_not_on_one_page(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text('[keys]\nwizard_batch = "p"\nwizard_chunk = "w"\nwizard_try = "f1"\n')
    settings, problems = load_settings(file)
    assert dict(settings.keys) == {"wizard_batch": "p"}
    assert "wizard_why has this key" in problems[0] and "help has this key" in problems[1]


async def test_what_is_heard_while_the_wizard_is_taken_down_is_let_go(
    folder: Path, opened: Any
) -> None:
    async with opened(folder) as wizard:
        await wizard.until(lambda: "What would you like" in wizard.text())
        for name in ("#start-choices", "#aside", "#footer"):
            await wizard.screen.query_one(name).remove()
        wizard.screen.redraw()  # NoMatches would end the app with a traceback
        wizard.screen.heard()
        wizard.screen._tick()
        assert wizard.app.is_running
