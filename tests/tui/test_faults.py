"""Engines that are slow, silent, flooding or gone: the app answers keys and shows no old number."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fluxtrain.events import events as ev
from fluxtui.app import FluxApp
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.source import EventBatch
from fluxtui.state.run import LOG_LIMIT, MOVES_LIMIT, RATES_LIMIT

SIZE = (120, 40)
FLOOD_A_SECOND = 10_000


async def test_a_source_that_hangs_keeps_no_key_waiting(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    hang = threading.Event()

    class Hanging(JournalSource):
        polls = 0

        def poll(self) -> EventBatch:
            self.polls += 1
            if self.polls > 2:
                hang.wait(60)  # a file system that does not answer
            return super().poll()

    app = FluxApp(Hanging(run), sample_machine=False, runs_folder=run.parent)
    try:
        async with app.run_test(size=SIZE) as pilot:
            await app_pilot.drawn(pilot)
            for key, title in (("4", "Gradient norm"), ("2", "By category"), ("5", "lines")):
                await pilot.press(key)
                await app_pilot.until(pilot, lambda title=title: title in app_pilot.text_of(app))
            hang.set()
    finally:
        hang.set()


async def test_ten_thousand_events_a_second_are_followed_to_the_last_one(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    journal = run / "events.ndjson"
    made.write(journal, made.stamped([made.hello(total_steps=100_000), made.step(1, 100_000)]))
    seconds, stop = 2, threading.Event()
    last = 1 + FLOOD_A_SECOND * seconds // 4

    def flood() -> None:
        now_s = made.START_S + 1.0
        with open(journal, "ab", buffering=0) as file:
            for tenth in range(seconds * 10):
                frames = []
                for i in range(FLOOD_A_SECOND // 40):
                    number = 2 + tenth * (FLOOD_A_SECOND // 40) + i
                    frames += [
                        made.step(number, 100_000), made.traffic(number), made.moves(number),
                        ev.LogWritten(level="info", text=f"line {number}"),
                    ]  # fmt: skip
                stamped = [msgspec.structs.replace(frame, wall_s=now_s) for frame in frames]
                file.write(b"".join(msgspec.json.encode(frame) + b"\n" for frame in stamped))
                if stop.wait(0.1):
                    return

    app = app_pilot.app_on(run, made)
    writer = threading.Thread(target=flood)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        writer.start()
        try:
            for key, title in (("4", "Gradient norm"), ("5", "lines"), ("1", "Buffers")):
                await pilot.press(key)
                await app_pilot.until(pilot, lambda title=title: title in app_pilot.text_of(app))
            await app_pilot.until(pilot, lambda: app.view.state.step.step == last, 60.0)
        finally:
            stop.set()
            writer.join()
        await app_pilot.until(pilot, lambda: f"step {last}/100000" in app_pilot.text_of(app))
        state = app.view.state
        assert app.view.link.corrupt_lines == 0
        assert len(state.log) <= LOG_LIMIT and len(state.moves) <= MOVES_LIMIT
        assert len(state.traffics) <= RATES_LIMIT and len(state.loss.buckets) <= 2 * 2048


async def test_a_run_whose_folder_is_deleted_under_the_app_is_told(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = FluxApp(JournalSource(run), sample_machine=False, runs_folder=run.parent)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        shutil.rmtree(run)
        await app_pilot.until(pilot, lambda: app.view.status.kind == "unreadable")
        await app_pilot.until(pilot, lambda: "its folder is gone" in app_pilot.text_of(app))
        await pilot.press("4", "7", "1")
        assert app.is_running


@pytest.mark.thinned(3)
@pytest.mark.parametrize("key", ["1", "2", "3", "4", "5", "6", "7", "S"])
async def test_every_screen_lives_through_a_resize_storm(
    run: Path, made: ModuleType, app_pilot: Any, key: str
) -> None:
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press(key)
        for width, height in ((80, 24), (250, 70), (20, 5), (61, 21), (1, 1), (100, 34), (80, 24)):
            await pilot.resize_terminal(width, height)

        def whole() -> bool:
            rows = app_pilot.text_of(app).splitlines()
            return len(rows) == 24 and "detach" in rows[-1] and "RUNNING" in rows[0]

        await app_pilot.until(pilot, whole)
