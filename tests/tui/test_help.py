"""The help screen at every size: all of it can be read, and nothing of it is cut."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtui.actions.table import ACTIONS
from fluxtui.panels import PANELS
from fluxtui.screens.dialogs import HelpScreen, help_lines
from fluxtui.widgets.spans import width_of


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40), (200, 60)])
async def test_all_of_the_help_can_be_scrolled_into_sight(
    run: Path, made: ModuleType, app_pilot: Any, size: tuple[int, int]
) -> None:
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=size) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("question_mark")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await app_pilot.until(pilot, lambda: "Screens" in app_pilot.text_of(app))
        assert "esc close" in app_pilot.text_of(app)
        await pilot.press("end")
        await app_pilot.until(pilot, lambda: "not known now" in app_pilot.text_of(app))
        await pilot.press("home")
        await app_pilot.until(pilot, lambda: "The whole run" in app_pilot.text_of(app))


async def test_the_help_fits_a_terminal_that_is_made_smaller(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=(200, 80)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("question_mark")
        await app_pilot.until(pilot, lambda: "not known now" in app_pilot.text_of(app))
        await pilot.resize_terminal(60, 20)
        await app_pilot.until(pilot, lambda: "not known now" not in app_pilot.text_of(app))
        await pilot.press("end")
        await app_pilot.until(pilot, lambda: "not known now" in app_pilot.text_of(app))


@pytest.mark.parametrize("width", [47, 66, 72])
def test_no_word_of_the_help_is_cut(width: int) -> None:
    lines = help_lines(width=width)
    assert all(width_of(line) <= width for line in lines)
    told = " ".join(" ".join("".join(part for part, _ in line).split()) for line in lines)
    for about in (*(action.about for action in ACTIONS), *(one.about for one in PANELS.values())):
        assert " ".join(about.split()) in told
