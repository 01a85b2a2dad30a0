"""Drives the app in tests: on a run, until something is true, and what its screen says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from textual.pilot import Pilot

from fluxtui.app import FluxApp

SIZE = (120, 40)


def app_on(run: Path, made: ModuleType, **options: Any) -> FluxApp:
    """The app on a run, half a second after the last event of eighty made steps."""
    last_s = made.training(80)[-1].wall_s
    options.setdefault("wall_clock", lambda: last_s + 0.5)
    options.setdefault("sample_machine", False)
    options.setdefault("runs_folder", run.parent)
    return FluxApp(made.Alive(run), **options)


async def until(pilot: Pilot[None], true: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait for something; the limit is for what never comes, not for what is slow."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await pilot.pause(0.05)


async def drawn(pilot: Pilot[None]) -> None:
    """Wait for the first step on the screen."""
    app = pilot.app
    assert isinstance(app, FluxApp)
    await until(pilot, lambda: app.view.state.step is not None)
    await still(pilot)


async def still(pilot: Pilot[None]) -> None:
    """Wait until nothing moves any more: what was asked for has been laid out and drawn."""
    app = pilot.app
    assert isinstance(app, FluxApp)
    seen: list[str] = []

    def same() -> bool:
        seen.append(text_of(app))
        return len(seen) > 2 and seen[-1] == seen[-2] == seen[-3]

    await until(pilot, same)


def text_of(app: FluxApp) -> str:
    """What the screen in front shows, without colours."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def notes(app: FluxApp) -> list[str]:
    """What the app told in passing."""
    return [f"{note.title}: {note.message}" for note in app._notifications]
