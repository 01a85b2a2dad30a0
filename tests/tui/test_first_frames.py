"""Screens are ready before their keys are pressed, and what they show first is of now."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.geometry import Region
from textual.screen import Screen

import fluxtui.app
from fluxtui.app import MADE_READY, FluxApp
from fluxtui.themes import load_themes
from fluxtui.widgets.ground import Ground
from tests.tui.app_pilot import SIZE, app_on, drawn, still, text_of, until

KEYS = {"loss": "4", "log": "5", "plan": "6", "memory": "2", "transfer": "3"}
SIGNS = {
    "loss": "At the crosshair", "log": "following the newest", "plan": "Predicted and measured",
    "memory": "By category", "transfer": "Stalls",
}  # fmt: skip


def frames_of(app: FluxApp, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The screen's name and all that it shows, whenever something is painted from now on."""
    frames: list[tuple[str, str]] = []
    painted = app._display

    def display(screen: Screen[Any], renderable: Any) -> None:
        if renderable is not None:
            strips = screen._compositor.render_strips()
            frames.append((getattr(screen, "NAME", ""), "\n".join(strip.text for strip in strips)))
        painted(screen, renderable)

    monkeypatch.setattr(app, "_display", display)
    return frames


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("ready", [True, False])
async def test_the_first_frame_of_a_screen_is_whole(
    run: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, ready: bool
) -> None:
    if not ready:
        monkeypatch.setattr(fluxtui.app, "FIRST_AT_REST_S", 1e6)
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await until(pilot, lambda: not ready or all(map(app.is_ready, MADE_READY)))
        assert app.is_ready(name) == ready
        frames = frames_of(app, monkeypatch)
        await pilot.press(KEYS[name])
        await until(pilot, lambda: any(at == name for at, _ in frames))
        shown = [text for at, text in frames if at == name]
        if ready:
            assert SIGNS[name] in shown[0] and "RUNNING" in shown[0]
        await still(pilot)
        assert SIGNS[name] in text_of(app)


async def test_screens_are_made_behind_the_one_in_front(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        before = text_of(app)
        await until(pilot, lambda: all(map(app.is_ready, MADE_READY)))
        await still(pilot)
        assert app.screen_name == "dashboard" and len(app.screen_stack) == 2
        assert text_of(app) == before


async def test_a_screen_that_was_left_comes_back_as_of_now(
    run: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = run / "events.ndjson"
    made.write(journal, made.training(40))
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "step 40/200" in text_of(app))
        await pilot.press("4")
        await until(pilot, lambda: app.screen_name == "loss")
        made.write(journal, made.training(80))
        await until(pilot, lambda: app.view.state.step and app.view.state.step.step == 80)
        frames = frames_of(app, monkeypatch)
        await pilot.press("1")
        await until(pilot, lambda: any(at == "dashboard" for at, _ in frames))
        assert "step 80/200" in next(text for at, text in frames if at == "dashboard")


async def test_a_screen_that_was_made_at_another_size_fits_the_present_one(
    run: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await until(pilot, lambda: all(map(app.is_ready, MADE_READY)))
        await pilot.resize_terminal(90, 30)
        await still(pilot)
        frames = frames_of(app, monkeypatch)
        await pilot.press("3")
        await until(pilot, lambda: any(at == "transfer" for at, _ in frames))
        rows = next(text for at, text in frames if at == "transfer").splitlines()
        assert len(rows) == 30 and {len(row) for row in rows} == {90}
        assert rows[1].endswith("╮") and "Stalls" in rows[1]


async def test_nothing_is_made_ready_beside_the_wizard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fluxtui.app, "FIRST_AT_REST_S", 0.01)
    monkeypatch.setattr(fluxtui.app, "AT_REST_S", 0.01)
    wizard: Screen[Any] = Screen()
    app = FluxApp(
        start_screen="wizard", sample_machine=False, runs_folder=tmp_path,
        make_wizard=lambda: wizard,
    )  # fmt: skip
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.screen is wizard)
        await pilot.pause(0.2)
        assert not any(map(app.is_ready, MADE_READY))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("theme", load_themes()[0])
async def test_a_screen_that_was_made_before_a_change_of_theme_has_the_new_ground(
    run: Path, made: ModuleType, theme: str
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await until(pilot, lambda: all(map(app.is_ready, MADE_READY)))
        app.choose_theme(theme)
        await pilot.press("2")
        await until(pilot, lambda: app.screen_name == "memory")
        await still(pilot)
        for ground in (app.screen, app.screen.query_one("#body")):
            assert isinstance(ground, Ground)
            for crop in (ground.size.region, Region(3, 1, 4, 2)):
                wanted = ground._styles_cache.render_widget(ground, crop)
                drawn_rows = ground.render_lines(crop)
                assert [list(row) for row in drawn_rows] == [list(row) for row in wanted]
