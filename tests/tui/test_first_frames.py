"""Screens are ready before their keys are pressed, and what they show first is of now."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.screen import Screen

import fluxtui.app
from fluxtui.app import MADE_READY, FluxApp
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
