"""What the screens say of keys, where the user has given actions other ones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtui.app import FluxApp
from fluxtui.panels import PANELS
from fluxtui.screens.chrome import notice_lines
from fluxtui.screens.dialogs import QuestionDialog
from fluxtui.screens.panel_screen import framed
from fluxtui.screens.runs import RunsScreen
from fluxtui.settings import load_settings, save_settings
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line

OWN = {
    "apply_advice": "F9", "show_plan": "W", "pause": "P", "block_before": "(",
    "block_after": ")", "crosshair_back": "<", "crosshair_on": ">", "crosshair_off": "-",
}  # fmt: skip


def text(lines: list[Line]) -> str:
    return "\n".join("".join(part for part, _ in line) for line in lines)


def view_of(made: ModuleType, *more: ev.AnyEvent, **options: Any) -> View:
    events = made.training(30)
    last_s = events[-1].wall_s
    state = FoldedRun().after_all([*events, *(replace(event, wall_s=last_s) for event in more)])
    options.setdefault("link", Link(process="alive"))
    return View(state=state, wall_s=last_s + 0.5, **options)


@pytest.mark.parametrize("keys", [{}, OWN])
def test_a_panel_names_the_keys_that_work(made: ModuleType, keys: dict[str, str]) -> None:
    given = ev.AdviceGiven(id="a", text="so", how="prefetch=2", apply={"prefetch": 2})
    view = view_of(made, given, key_texts=keys, chart=ChartSettings(crosshair=5, block=1))
    shown = {name: text(framed(PANELS[name], view, 110, 10, "box")) for name in PANELS}
    assert f"{keys.get('apply_advice', 'a')} applies it" in shown["advice"]
    assert f"{keys.get('show_plan', '6')} shows 2 pieces of advice" in shown["log"]
    assert ("( ) choose" if keys else "← → choose") in shown["block"]
    assert ("< > move  - hides" if keys else "← → move  esc hides") in shown["readout"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "p resumes"),
        ({"key_texts": OWN}, "P resumes"),
        ({"read_only": True}, ""),
        ({"link": Link(replay=True)}, ""),
    ],
)
def test_a_paused_run_says_how_to_go_on_where_that_can_be_asked_for(
    made: ModuleType, options: dict[str, Any], said: str
) -> None:
    view = view_of(made, ev.PhaseChanged(phase="paused"), **options)
    assert view.status.kind == "paused"
    assert text(notice_lines(view, 80)).strip(" ‖") == said


async def test_the_app_tells_its_screens_the_users_keys(
    tmp_path: Path, made: ModuleType, app_pilot: Any
) -> None:
    file = tmp_path / "config" / "app.toml"
    file.parent.mkdir()
    file.write_text('[keys]\nnew_run = "f9"\ndetach = "f10"\n')
    run = tmp_path / "runs" / "demo"
    made.write(run / "events.ndjson", made.training(80))
    app = app_pilot.app_on(run, made, settings_file=file, runs_folder=tmp_path / "none")
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("Q")
        await app_pilot.until(pilot, lambda: "press f10 instead" in app_pilot.text_of(app))
    app = FluxApp(
        None, start_screen="runs", settings_file=file, runs_folder=tmp_path / "none",
        sample_machine=False,
    )  # fmt: skip
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.until(pilot, lambda: isinstance(app.screen, RunsScreen))
        await app_pilot.until(pilot, lambda: "no runs here yet: f9 makes" in app_pilot.text_of(app))


async def test_the_key_that_textual_quits_with_can_be_given_to_an_action(
    tmp_path: Path, made: ModuleType, app_pilot: Any
) -> None:
    file, run = tmp_path / "app.toml", tmp_path / "runs" / "demo"
    file.write_text('[keys]\nstop = "ctrl+q"\n')
    made.write(run / "events.ndjson", made.training(80))
    app = app_pilot.app_on(run, made, settings_file=file)
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("ctrl+q")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, QuestionDialog))
        assert app.is_running and not app._exit


async def test_another_key_on_one_screen_leaves_the_old_one_to_the_other_screens(
    tmp_path: Path, made: ModuleType, app_pilot: Any
) -> None:
    file, run = tmp_path / "app.toml", tmp_path / "runs" / "demo"
    file.write_text('[keys]\ncrosshair_back = "z"\n')
    made.write(run / "events.ndjson", made.training(80))
    app = app_pilot.app_on(run, made, settings_file=file)
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("4")
        await app_pilot.until(pilot, lambda: app.screen_name == "loss")
        await pilot.press("left")
        assert app.view.chart.crosshair is None
        await pilot.press("z")
        assert app.view.chart.crosshair is not None
        await pilot.press("2")
        await app_pilot.until(pilot, lambda: app.screen_name == "memory")
        await pilot.press("left")
        assert app.view.chart.block is not None


def test_a_setting_in_quotes_is_changed_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text('"theme" = "flux-light"\n\'smooth\' = false\n[keys]\nstop = "ctrl+q"\n')
    settings, problems = load_settings(file)
    assert problems == [] and settings.theme == "flux-light" and not settings.smooth
    assert save_settings(settings, file)
    assert load_settings(file) == (settings, [])


def test_a_file_that_saving_would_break_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    text = 'theme = """\nflux-light"""\n'  # a value over two lines
    file.write_text(text)
    settings, _ = load_settings(file)
    assert not save_settings(settings, file)
    assert file.read_text() == text
