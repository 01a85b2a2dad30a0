"""The lanes of a step on the screen, from the ring that a real run wrote and from made ones."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.trace.lanes import Interval, StepLanes
from fluxtrain.events.trace.ring import SLOTS, RingReader, RingWriter
from fluxtui.app import FluxApp
from fluxtui.csv_tables import csv_of
from fluxtui.panels.lanes import KINDS, PANEL
from fluxtui.plots.lane_bars import Kind, bar, cells_of, ruler
from fluxtui.screens.panel_screen import framed
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.timeline import Timeline, chosen
from fluxtui.state.view import ChartSettings, View
from fluxtui.themes import ROLES
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


def made_view(made: ModuleType, folder: Path, *intervals: Interval, **fields: object) -> View:
    ring = RingWriter(folder / "timeline.ring")
    ring.write(StepLanes(step=80, wall_s=1.0, length_s=1.0, intervals=intervals, **fields))  # type: ignore[arg-type]
    ring.close()
    state = FoldedRun().after_all(made.training(80))
    return View(state=state, timeline=timeline_of(folder / "timeline.ring"), wall_s=made.START_S)


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


def test_a_lane_of_a_cpu_run_is_not_called_a_gpu(made: ModuleType, tmp_path: Path) -> None:
    assert "\n│ dev" in drawn(recorded())
    view = made_view(made, tmp_path, Interval("gpu", "forward", "a", 0.0, 0.9))
    on_gpu = FoldedRun().after_all(made.stamped([made.hello(device="NVIDIA H200")]))
    assert "\n│ gpu" in drawn(replace(view, state=on_gpu))


def test_a_checkpoint_is_drawn_and_the_evaluation_before_it_only_told() -> None:
    text = drawn(recorded(last_step=20))
    assert "checkpoint" in text and "disk" in text.split("bound")[1].splitlines()[0]
    assert "then evaluation" in text
    assert "5.3" not in text.splitlines()[0]  # the length is that of the step alone


@pytest.mark.parametrize("width", [60, 90, 98, 114, 118, 130, 160, 200])
def test_what_bound_a_step_is_told_whole_where_its_heading_has_no_room(
    made: ModuleType, tmp_path: Path, width: int
) -> None:
    intervals = [("gpu", "forward", "a", 0.0, 0.5), ("stall", "gradients", "", 0.5, 0.2)]
    view = made_view(made, tmp_path, *(Interval(*one) for one in intervals))
    text = drawn(view, width)
    assert text.count("bound") == 1
    assert width < 98 or "waits 200 ms for it" in text
    assert width < 200 or "unrecorded 300 ms (30 %)" in text


def test_a_stall_is_marked_and_its_cause_is_named_without_colour(
    made: ModuleType, tmp_path: Path
) -> None:
    view = made_view(
        made, tmp_path,
        Interval("stall", "weights", "", 0.0, 0.3), Interval("gpu", "forward", "a", 0.3, 0.7),
        Interval("h2d", "weights", "a", 0.0, 0.3),
    )  # fmt: skip
    text = drawn(view)
    assert "waits for weights" in text and "\n│ wait" in text
    assert "waits 300 ms  weights 300 ms" in text
    small = drawn(view, width=60, height=7)
    assert "!" in small or "waits" in small


def test_moments_that_come_after_the_weights_have_a_letter_of_their_own(
    made: ModuleType, tmp_path: Path
) -> None:
    view = made_view(
        made, tmp_path,
        Interval("gpu", "forward", "a", 0.0, 1.0),
        Interval("cpu", "update", "a", 0.0, 0.4), Interval("cpu", "moments", "a", 0.4, 0.5),
    )  # fmt: skip
    text = drawn(view)
    assert KINDS["moments"].letter == "M"
    assert "M  moments" in text and "U  update" in text
    assert "moments" in next(row for row in text.splitlines() if row.startswith("│ cpu"))


def test_a_panel_in_full_names_the_longest_with_their_blocks() -> None:
    rows = drawn(recorded(last_step=19), height=36).splitlines()
    start = next(i for i, row in enumerate(rows) if "the longest" in row)
    assert "backward" in rows[start + 1] and "model.layers." in rows[start + 1]
    assert all("%" in row for row in rows[start + 1 : -1])
    assert "the longest" not in drawn(recorded(last_step=19))


def test_the_lanes_on_screen_are_saved_as_rows() -> None:
    rows = list(csv.DictReader(csv_of("lanes", recorded(last_step=19)).splitlines()))
    step = recorded().timeline.at(19)
    assert step is not None and len(rows) == len(step.lanes.intervals)
    assert {row["step"] for row in rows} == {"19"}
    assert sum(float(row["duration_s"]) for row in rows if row["lane"] == "gpu") > 0
    assert csv_of("lanes", View()) == "\n"


def test_what_a_record_left_out_is_told(made: ModuleType, tmp_path: Path) -> None:
    one = Interval("gpu", "forward", "a", 0.0, 1.0)
    view = made_view(made, tmp_path, one, late=2, dropped=1, merged=7)
    assert "7 merged, 3 left out" in drawn(view)


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


def test_the_choice_of_a_step_follows_unless_one_looks_back() -> None:
    timeline = timeline_of(RECORDED / "timeline.ring")
    newest = chosen(timeline, None, None)
    assert not isinstance(newest, str) and newest.head.step == 40
    older = chosen(timeline, 7, None)
    assert not isinstance(older, str) and older.head.step == 7
    assert chosen(Timeline(True), None, 5) == "no step so far"
    behind = Timeline(True, timeline.steps[20:])
    assert f"{SLOTS} steps are kept" in str(chosen(behind, None, 5))


def test_every_kind_has_its_own_letter_and_a_role_of_the_themes() -> None:
    letters = [kind.letter for kind in KINDS.values()]
    assert len(letters) == len(set(letters))
    assert {kind.role for kind in KINDS.values()} <= set(ROLES)


PIECES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12)


@given(PIECES, st.integers(1, 80))
def test_cells_hide_nothing_and_claim_no_more_than_there_was(
    pieces: list[tuple[float, float]], width: int
) -> None:
    spans = [(min(pair), max(pair)) for pair in pieces]
    intervals = [Interval("gpu", "forward", "", a, b - a) for a, b in spans]
    cells = cells_of(intervals, 1.0, width)
    assert len(cells) == width and all(0 <= cell.share <= 1 for cell in cells)
    assert sum(cell.share for cell in cells) <= sum(b - a for a, b in spans) * width + 1e-6
    for start, stop in spans:
        if stop - start > 1e-9:
            middle = min(width - 1, int((start + stop) / 2 * width))
            assert cells[middle].level > 0
    line = bar(cells, lambda name: Kind("F", "forward", "forward"))
    assert width_of(line) == width


@pytest.mark.parametrize("width", [14, 40, 80, 200])
def test_the_ruler_begins_at_nothing_and_ends_at_the_length(width: int) -> None:
    ((text, _),) = ruler(2.0, width)
    assert len(text) == width and text.startswith("0") and text.endswith("2.00 s")


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


def test_work_that_was_queued_late_has_a_lane_of_its_own(made: ModuleType, tmp_path: Path) -> None:
    view = made_view(
        made, tmp_path,
        Interval("gpu", "forward", "a", 0.0, 0.9), Interval("queue", "forward", "", 0.0, 0.6),
    )  # fmt: skip
    text = drawn(view)
    lane = next(line for line in text.splitlines() if line.startswith("\u2502 queue"))
    assert "60" in lane and "600 ms" in lane
    assert "queued late by the host" in text
    assert "queue" not in drawn(recorded())
