"""Drives the wizard in tests: its screen with a stand-in engine, its keys, and what it shows."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.app import App
from textual.pilot import Pilot

from fluxtui.wizard.answers import Answers
from fluxtui.wizard.launching import Launch
from fluxtui.wizard.screen import WizardScreen

# Stands in for the engine's two questions; what it was asked is kept beside it. The real engine is
# asked in test_end_to_end.py.
ENGINE = """
import json, pathlib, sys, time
here = pathlib.Path(__file__).parent
with open(here / "asked", "a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "plan":
    while (here / "hold").exists():
        time.sleep(0.02)
answer = here / (sys.argv[1] + ".json")
if not answer.exists():
    sys.exit("error: the model needs 80 GiB and 24 GiB is free")
print(answer.read_text())
"""
PLAN = {
    "offload": "none", "steps": 200, "device": "cpu", "device_bytes": 2**20,
    "device_budget_bytes": 2**30, "host_bytes": 2**21, "host_limit_bytes": 2**31,
    "model": {"name": "demo", "parameters": 5_800_000, "blocks": 6},
    "settings": [{"key": "model.path", "value": "demo", "changed": False}],
    "choices": [{"name": "batch_rows", "value": "8", "because": "1,024 tokens make a step"}],
}  # fmt: skip


class Host(App[None]):
    """Shows the wizard and keeps what it ends with."""

    def __init__(self, wizard: WizardScreen) -> None:
        super().__init__()
        self.wizard = wizard
        self.ended_with: list[Launch | None] = []

    def on_mount(self) -> None:
        self.push_screen(self.wizard, self.ended_with.append)


class Wizard:
    """A wizard under test with its pilot."""

    def __init__(self, app: Host, pilot: Pilot[None], folder: Path) -> None:
        self.app, self.pilot, self.folder = app, pilot, folder

    @property
    def screen(self) -> WizardScreen:
        return self.app.wizard

    @property
    def step(self) -> str:
        return self.screen.answers.step

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, true: Callable[[], Any]) -> None:
        for _ in range(500):
            if true():
                await self.pilot.pause()
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"did not come about; the screen says\n{self.text()}")

    async def go_to(self, step: str) -> None:
        while self.step != step:
            before = self.step
            if before == "plan":
                await self.until(lambda: self.screen.plan)
            await self.press("enter")
            await self.until(lambda before=before: self.step != before)

    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    def asked(self) -> list[list[str]]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [json.loads(line) for line in lines]


def furnish(tmp_path: Path) -> Path:
    """A folder with a stand-in engine that plans and measures."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "probe.json").write_text("{}")
    return tmp_path


@asynccontextmanager
async def opened(
    folder: Path, answers: Answers | None = None, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Wizard]:
    """The wizard on screen, with its runs, draft and engine in `folder`."""
    screen = WizardScreen(
        answers,
        folder / "runs",
        draft=folder / "draft.json",
        engine=(sys.executable, str(folder / "engine.py")),
    )
    app = Host(screen)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Wizard(app, pilot, folder)
