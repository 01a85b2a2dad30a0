"""The lanes of a step on the screen, from the ring that a real run wrote and from made ones."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.trace.lanes import Interval, StepLanes
from fluxtrain.events.trace.ring import RingReader, RingWriter
from fluxtui.app import FluxApp
from fluxtui.panels.lanes import PANEL
from fluxtui.screens.panel_screen import framed
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.timeline import Timeline
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line, width_of

RECORDED = Path(__file__).parent / "recorded" / "streamed"


def timeline_of(path: Path) -> Timeline:
    reader = RingReader(path)
    reader.poll()
    return Timeline(reader.exists, reader.steps)


def recorded(last_step: int | None = None) -> View:
    state = FoldedRun().after_all(JournalFollower(RECORDED / "events.ndjson").read_all())
    return View(
        state=state,
        timeline=timeline_of(RECORDED / "timeline.ring"),
        chart=ChartSettings(last_step=last_step),
        wall_s=(state.last_wall_s or 0) + 1,
    )


def text_of(lines: list[Line]) -> str:
    return "\n".join("".join(text for text, _ in spans) for spans in lines)


def drawn(view: View, width: int = 118, height: int = 12) -> str:
    return text_of(framed(PANEL, view, width, height, "box"))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (9, 3), (38, 7), (76, 10), (196, 30)])
def test_every_recorded_step_keeps_its_box(width: int, height: int) -> None:
    view = recorded()
    for one in view.timeline.steps:
        looking = replace(view, chart=ChartSettings(last_step=one.head.step))
        assert len(PANEL.body(looking, width, height)) <= height
        if width > 30:
            lines = framed(PANEL, looking, width, height, "box")
            assert {width_of(spans) for spans in lines} == {width}, one.head.step


def test_a_recorded_step_shows_every_lane_its_letters_and_what_bound_it() -> None:
    text = drawn(recorded(last_step=19))
    for part in ("step 19", "looking back", "bound", "dev", "in ", "out", "cpu", "disk"):
        assert part in text, part
    for letter, label in (("F", "forward"), ("B", "backward"), ("W", "weights"), ("H", "head")):
        assert letter in text and label in text


def test_a_run_without_a_ring_says_so_and_shows_its_phases(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(80))
    text = drawn(View(state=state, wall_s=(state.last_wall_s or 0) + 0.5))
    assert "keeps no timeline" in text and "forward" in text
    waiting = drawn(View())
    assert "keeps no timeline" not in waiting and "no step so far" in waiting, "nobody knows yet"


def test_a_step_that_left_the_ring_is_not_shown_as_another() -> None:
    view = recorded()
    assert "step 999 is not there" in drawn(replace(view, chart=ChartSettings(last_step=999)))


def test_a_replay_never_shows_a_step_before_it_happened() -> None:
    view = recorded()
    early = JournalFollower(RECORDED / "events.ndjson").read_all()[:40]
    state = FoldedRun().after_all(early)
    replay = replace(view, state=state, link=Link(replay=True))
    assert state.step is not None
    assert f"step {state.step.step}" in drawn(replay)
    before = replace(replay, state=FoldedRun())
    assert "no step so far" in drawn(before)


async def test_left_and_right_look_back_through_the_steps_of_a_finished_run() -> None:
    app = FluxApp(
        ReplaySource(RECORDED / "events.ndjson", None), start_screen="transfer",
        sample_machine=False,
    )  # fmt: skip
    async with app.run_test(size=(120, 40)) as pilot:
        deadline = time.monotonic() + 60
        while app.view.state.done is None or not app.view.timeline.steps:
            assert time.monotonic() < deadline
            await pilot.pause(0.05)
        panel = app.screen.query_one("#lanes", Lines)
        while "step 40" not in panel.text:
            assert time.monotonic() < deadline
            await pilot.pause(0.05)
        await pilot.press("left", "left")
        assert "step 38" in panel.text and "looking back" in panel.text
        await pilot.press("right")
        assert "step 39" in panel.text
        await pilot.press("right")
        assert "step 40" in panel.text and "looking back" not in panel.text


async def test_the_lanes_follow_a_ring_that_grows(made: ModuleType, tmp_path: Path) -> None:
    path = made.write(tmp_path / "events.ndjson", made.training(3))
    ring = RingWriter(tmp_path / "timeline.ring")
    one = StepLanes(step=1, wall_s=1, length_s=1, intervals=[Interval("gpu", "head", "", 0, 1)])
    ring.write(one)
    app = FluxApp(ReplaySource(path, None), start_screen="transfer", sample_machine=False)
    async with app.run_test(size=(80, 24)) as pilot:
        for step in (1, 2, 3):
            if step > 1:
                ring.write(replace(one, step=step))
            deadline = time.monotonic() + 60
            while f"step {step} " not in app.screen.query_one("#lanes", Lines).text:
                assert time.monotonic() < deadline
                await pilot.pause(0.05)
