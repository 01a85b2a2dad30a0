"""The app beside floods, resizes, killed trainers and journals that cannot be read."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtui.app import FluxApp
from fluxtui.screens.run_screen import RunScreen
from fluxtui.sources.journal import JournalSource
from fluxtui.widgets.lines import Lines
from tests.tui.app_pilot import SIZE, app_on, drawn, text_of, until


async def test_a_flood_does_not_keep_keys_waiting(run: Path, made: ModuleType) -> None:
    from fluxtui.sources.source import EventBatch
    from fluxtui.state.status import Link

    class Flood(made.Alive):  # type: ignore[name-defined]
        polls = 0

        def poll(self) -> EventBatch:
            self.polls += 1
            time.sleep(0.02)
            return EventBatch(made.training(40)[:250], Link(process="alive"))

    source = Flood(run)
    app = FluxApp(source, sample_machine=False)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        waits = []
        for key, name in (("4", "loss"), ("5", "log"), ("6", "plan"), ("1", "dashboard")):
            before = source.polls
            await pilot.press(key)
            await until(pilot, lambda name=name: name == app.screen.NAME)
            waits.append(source.polls - before)
        assert max(waits) < 60, "batches of the flood that were taken while a key waited"
        assert app.view.state.seen > 250


async def test_a_resize_storm_ends_with_the_right_size(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        for width, height in ((80, 24), (200, 60), (40, 10), (61, 21), (100, 34), (80, 24)):
            await pilot.resize_terminal(width, height)
        await until(pilot, lambda: len(text_of(app).splitlines()) == 24)
        await until(pilot, lambda: "detach" in text_of(app).splitlines()[-1])
        await until(pilot, lambda: "step 80/200" in text_of(app).splitlines()[1])


async def test_a_tiny_terminal_shows_one_true_status_line(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=(50, 8)) as pilot:
        await drawn(pilot)
        rows = [row for row in text_of(app).splitlines() if row.strip()]
        assert len(rows) == 2 and "RUNNING" in rows[0] and "80/200" in rows[0]
        assert "detach" in rows[1]


async def test_a_killed_trainer_is_told(run: Path, made: ModuleType) -> None:
    (run / "engine.log").write_text("Killed\n")
    app = FluxApp(JournalSource(run), sample_machine=False, runs_folder=run.parent)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.view.status.kind == "dead")
        await until(pilot, lambda: "is gone after step 80: Killed" in text_of(app))
        text = text_of(app)
        assert "DEAD" in text
        assert "1.50 GB/s" not in text  # its rates are of then, not of now


@pytest.mark.parametrize(
    ("screen", "shown", "said"),
    [
        ("dashboard", "80/200", "d leaves; the run has ended"),
        ("wizard", "What would you", "esc goes one step back; on the first step it leaves"),
    ],
)
async def test_ctrl_c_says_what_leaves(
    screen: Any, shown: str, said: str, run: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FluxApp(JournalSource(run), sample_machine=False, start_screen=screen)
    told: list[str] = []
    monkeypatch.setattr(app, "notify", lambda message, **_: told.append(message))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: shown in text_of(app))  # before that another screen answers
        for _ in range(20):  # a page that is being drawn again can take a key with it
            await pilot.press("ctrl+c")
            if said in told:
                break
            await pilot.pause(0.2)
        assert told[-1] == said
        assert app.is_running


@pytest.mark.parametrize("key", ["colon", "question_mark"])
async def test_a_run_goes_on_around_a_dialog(key: str, run: Path, made: ModuleType) -> None:
    events = made.training(90)
    made.write(run / "events.ndjson", events[: len(events) // 2])
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        dashboard = app.screen
        await pilot.press(key)
        await until(pilot, lambda: app.screen is not dashboard)

        def shown() -> str:
            strips = dashboard._compositor.render_strips()
            return "".join(segment.text for strip in strips for segment in strip)

        assert "step 90/200" not in shown()
        made.write(run / "events.ndjson", events)
        await until(pilot, lambda: "step 90/200" in shown(), limit_s=20.0)


async def test_a_newer_schema_is_told(run: Path, made: ModuleType) -> None:
    made.write(run / "events.ndjson", [made.hello(schema="9.0")])
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.view.status.kind == "unreadable")
        await until(pilot, lambda: "9.0" in text_of(app))


async def test_news_that_come_while_the_app_is_taken_down_are_let_go(
    run: Path, made: ModuleType
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        screen = app.screen
        assert isinstance(screen, RunScreen)
        await screen.query_one("#top", Lines).remove()
        app.redraw()  # NoMatches would end the app with a traceback
        assert not screen.query("#top")


async def test_a_corrupt_journal_is_drawn_as_far_as_it_can_be_read(
    run: Path, made: ModuleType
) -> None:
    journal = run / "events.ndjson"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[30:30] = [b"\x00\xff\xfe garbage\n", b'{"event": "step", "step":\n', b"[]\n"]
    journal.write_bytes(b"".join(lines) + b'{"event":"st')
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await until(pilot, lambda: "step 80/200" in text_of(app))
        assert app.view.link.corrupt_lines == 3
        assert app.view.status.kind == "running"


async def test_unchanged_lines_are_not_repainted(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.pause(0.4)
        panel = app.screen.query_one("#loss", Lines)
        lines = list(panel._lines)
        assert panel.show(lines, app.palette) == 0
        lines[3] = (("changed", "text"),)
        assert panel.show(lines, app.palette) == 1


async def test_the_first_paint_brings_no_torch_and_nothing_of_later_screens() -> None:
    later = (
        "torch", "transformers", "pynvml", "psutil", "statistics", "importlib.metadata",
        "fluxtui.wizard.screen", "fluxtui.screens.log", "fluxtui.screens.plan",
        "fluxtui.screens.dialogs", "fluxtui.screens.settings", "fluxtui.csv_tables",
    )  # fmt: skip
    code = (
        "import sys, fluxtui.launch, fluxtui.app, fluxtui.screens.charts, fluxtui.sources.journal\n"
        f"print([m for m in {later} if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]" and process.returncode == 0
