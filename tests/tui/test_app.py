"""The app on a run: its screens, charts, log and list of runs, driven by keys as a user does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from textual.binding import BindingType
from textual.screen import Screen

from fluxtui.actions.table import ACTIONS, PAGES, RUN_SCREENS, find
from fluxtui.app import FluxApp, make_screen
from fluxtui.screens.dialogs import HelpScreen
from fluxtui.screens.log import LogScreen
from fluxtui.screens.panel_screen import PanelGrid, PanelScreen
from fluxtui.screens.run_screen import RunScreen
from fluxtui.screens.runs import RunsScreen
from tests.tui.app_pilot import SIZE, app_on, drawn, notes, text_of, until


async def test_the_dashboard_draws_a_followed_run(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        text = text_of(app)
        for part in ("RUNNING", "step 80/200", "Buffers", "held-out", "forward"):
            assert part in text, part


@pytest.mark.parametrize(
    ("key", "name"),
    [("1", "dashboard"), ("2", "memory"), ("3", "transfer"), ("4", "loss"), ("5", "log"),
     ("6", "plan"), ("7", "runs")],
)  # fmt: skip
async def test_each_number_shows_its_screen(
    run: Path, made: ModuleType, key: str, name: str
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("7" if key == "1" else "1", key)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and name == app.screen.NAME)
        await until(pilot, lambda: "FluxTrain" in text_of(app))


@pytest.mark.parametrize("key", ["d", "q"])
async def test_detaching_leaves_the_app_alone(run: Path, made: ModuleType, key: str) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press(key)
        await until(pilot, lambda: not app.is_running)
    assert app.return_code == 0


@pytest.mark.parametrize("name", RUN_SCREENS)
def test_a_screen_and_the_app_bind_and_make_the_actions_of_that_screen(name: str) -> None:
    owners = (type(make_screen(name)), FluxApp)
    bound = {binding.id for owner in owners for _, binding in owner._merged_bindings or ()}
    here = [action for action in ACTIONS if action.works_on(name) and not action.in_lists]
    assert {one for one in bound if one and not find(one).in_lists} == {one.id for one in here}
    for action in here:
        method = f"action_{action.do.split('(')[0]}"
        assert any(hasattr(owner, method) for owner in owners), method


async def test_f_gives_the_focused_panel_the_screen_and_takes_it_back(
    run: Path, made: ModuleType
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        grid = app.screen.query_one(PanelGrid)
        await pilot.press("f")
        assert grid.maximised == "loss"
        await until(pilot, lambda: app.screen.query_one("#loss").size.height == 38)
        await pilot.press("f", "tab", "tab", "f")
        assert grid.maximised == "memory"
        await pilot.press("f")
        assert grid.maximised is None
        await until(pilot, lambda: app.screen.query_one("#memory").size.height == 5)


async def test_a_double_click_gives_a_panel_the_screen_and_takes_it_back(
    run: Path, made: ModuleType
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        grid = app.screen.query_one(PanelGrid)
        await pilot.double_click("#log")
        await until(pilot, lambda: grid.maximised == "log")
        await pilot.double_click("#log")
        await until(pilot, lambda: grid.maximised is None)


async def test_an_unknown_theme_is_told_and_the_default_used(run: Path, made: ModuleType) -> None:
    app = app_on(run, made, theme_name="pink")
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        assert app.theme == "flux-dark"
        assert any("no theme 'pink'" in note for note in notes(app))


async def test_help_shows_every_key_of_the_screen_in_front_and_closes(
    run: Path, made: ModuleType
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=(120, 80)) as pilot:
        await drawn(pilot)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await until(pilot, lambda: ACTIONS[0].about in text_of(app))
        text = text_of(app)
        here = [action for action in ACTIONS if action.works_on("dashboard")]
        assert all(action.about in text for action in here)
        assert "Crosshair" not in text and "Delete" not in text
        await pilot.press("p", "escape")  # no command leaves a dialog
        await until(pilot, lambda: isinstance(app.screen, PanelScreen))
        assert notes(app) == []


async def test_the_palette_runs_actions_by_name(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("colon")
        await until(pilot, lambda: "CommandPalette" in type(app.screen).__name__)
        await until(pilot, lambda: "Screens: Dashboard" in text_of(app))
        await pilot.press(*"every choice")
        await until(pilot, lambda: "Screens: Dashboard" not in text_of(app))
        await until(pilot, lambda: "Screens: Plan and advice" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.NAME == "plan")


def test_every_command_has_a_short_name_of_its_own_on_each_screen() -> None:
    for place in (*RUN_SCREENS, *PAGES):
        here = [one for one in ACTIONS if one.works_on(place) and not one.in_lists]
        titles = [f"{one.group}: {one.name}" for one in here]
        assert len(set(titles)) == len(titles), place
        assert all(0 < len(one.name) <= 24 for one in here)


async def test_export_saves_a_picture(
    run: Path, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("x")
        await until(pilot, lambda: list(tmp_path.glob("*.svg")) != [])


async def test_the_log_filters_and_follows(run: Path, made: ModuleType) -> None:
    app = app_on(run, made, start_screen="log")
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("slash", *"checkpoint", "enter")
        await until(pilot, lambda: "held-out" not in text_of(app))
        text = text_of(app)
        assert "step 80: checkpoint" in text and "held-out" not in text
        assert "2 of 9 lines  with checkpoint" in text
        screen = app.screen
        assert isinstance(screen, LogScreen)
        await pilot.press("s")
        assert not screen.following
        await pilot.press("slash", "escape")
        await until(pilot, lambda: "held-out" in text_of(app))


async def test_the_runs_are_listed_and_enter_attaches(
    run: Path, made: ModuleType, tmp_path: Path
) -> None:
    other = run.parent / "other"
    made.write(other / "events.ndjson", made.finished())
    app = app_on(run, made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "other" in text_of(app) and "demo" in text_of(app))
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        names = [Path(one.path).name for one in screen.runs]
        await pilot.press("g", *["j"] * names.index("other"), "enter")
        await until(pilot, lambda: app.run_dir == other)
        await until(pilot, lambda: app.view.status.kind == "finished")
        assert isinstance(app.screen, PanelScreen)


async def test_no_runs_say_how_to_make_one(tmp_path: Path) -> None:
    app = FluxApp(None, start_screen="runs", runs_folder=tmp_path, sample_machine=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "n makes one" in text_of(app))


async def test_the_wizard_is_asked_first_and_may_be_left(tmp_path: Path) -> None:
    class Asking(Screen[None]):
        BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "back")]

    app = FluxApp(
        None, start_screen="wizard", make_wizard=Asking, runs_folder=tmp_path, sample_machine=False
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: isinstance(app.screen, Asking))
        await pilot.press("d", "1")  # the app's keys are the wizard's letters here
        assert isinstance(app.screen, Asking) and app.is_running
        await pilot.press("escape")
        await until(pilot, lambda: app._exit)  # there is no run behind it
