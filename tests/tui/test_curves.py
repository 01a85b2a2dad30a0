"""The charts of screen 4: zoom, scale, smoothing, crosshair, and another run beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtui.panels import PANELS
from fluxtui.panels.chart import Trace, x_range
from fluxtui.panels.loss import pick
from fluxtui.screens.panel_screen import PanelLines
from fluxtui.state.history import Curve
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import ChartSettings, ComparedRun, View
from fluxtui.widgets.spans import Line


def whole(lines: Sequence[Line]) -> str:
    return "\n".join("".join(text for text, _ in spans) for spans in lines)


def drawn(view: View, panel_id: str, width: int = 100, height: int = 14) -> str:
    return whole(PANELS[panel_id].body(view, width, height))


@pytest.fixture
def state(made: ModuleType) -> FoldedRun:
    """Eighty steps."""
    return FoldedRun().after_all(made.training(80))


def slower(made: ModuleType, steps: int = 80, tokens: int = 8192) -> FoldedRun:
    """A run of twice the tokens a step, whose loss is half a nat higher."""
    events: list[ev.AnyEvent] = [made.hello()]
    for number in range(1, steps + 1):
        one = made.step(number)
        events.append(replace(one, loss=one.loss + 0.5, total_tokens=tokens * number))
    return FoldedRun().after_all(made.stamped(events))


def line_of(values: Sequence[float]) -> Trace:
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve = curve.with_value(step, value)
    return Trace(buckets=curve.buckets, role="train")


@pytest.mark.parametrize("zoom", [0.5, 0.25, 1 / 64, 1e-6])
def test_a_zoom_shows_the_newest_part_and_two_points_at_least(zoom: float) -> None:
    trace = line_of([float(i) for i in range(1, 101)])
    low, high = x_range([trace], ChartSettings(zoom=zoom))
    assert high == 100
    inside = [bucket for bucket in trace.buckets if low <= bucket.last <= high]
    assert max(2, round(99 * zoom)) <= len(inside) <= max(2, round(99 * zoom) + 1)


# --- the crosshair --------------------------------------------------------------------------------


def test_the_readout_tells_what_was_measured_at_that_step(
    state: FoldedRun, made: ModuleType
) -> None:
    text = drawn(View(state=state, chart=ChartSettings(crosshair=41)), "readout", 160, 2)
    step = made.step(41)
    for part in (
        "step 41", f"train {step.loss:.4f}", "eval 5.1130 @40", f"norm {step.grad_norm:.2f}",
        "lr 3.00e-4", "tokens 168 k",
    ):  # fmt: skip
        assert part in text, part


def test_the_crosshair_moves_by_hundredths_and_stops_at_the_ends(state: FoldedRun) -> None:
    view = View(state=state)
    assert view.crosshair_moved(-1) == 79
    view = changed(view, chart=ChartSettings(crosshair=40))
    assert (view.crosshair_moved(1), view.crosshair_moved(-10)) == (41, 30)
    assert (view.crosshair_moved(900), view.crosshair_moved(-900)) == (80, 1)
    assert View().crosshair_moved(1) is None


@pytest.mark.parametrize("step", [1, 20, 55, 80])
def test_a_click_finds_the_step_that_is_drawn_there(state: FoldedRun, step: int) -> None:
    view = View(state=state, chart=ChartSettings(crosshair=step))
    column = max(row.rfind("│") for row in drawn(view, "loss").splitlines())
    found = pick(changed(view, chart=ChartSettings()), 100, 14, column, 3)
    assert found is not None and abs((found.crosshair or 0) - step) <= 1


# --- another run ----------------------------------------------------------------------------------


def test_the_other_run_is_named_and_its_difference_told(state: FoldedRun, made: ModuleType) -> None:
    view = View(state=state, compared=ComparedRun("slower", slower(made)))
    view = changed(view, chart=ChartSettings(crosshair=30))
    heading = whole([PANELS["loss"].heading(view, 120)])
    assert "slower" in heading
    text = drawn(view, "readout", 160, 2)
    assert "ours -0.5000 against slower" in text
    assert drawn(view, "loss") != drawn(changed(view, compared=None), "loss")
    assert drawn(view, "grad_norm") != ""


def test_by_tokens_a_run_is_compared_at_as_many_tokens(state: FoldedRun, made: ModuleType) -> None:
    other = slower(made)  # twice the tokens a step: half the steps to the same place
    view = View(state=state, compared=ComparedRun("slower", other))
    view = changed(view, chart=ChartSettings(crosshair=60, by_tokens=True))
    ours, theirs = drawn(view, "readout", 160, 2).splitlines()
    assert "step 60" in ours and "step 30" in theirs
    assert "tokens 246 k" in ours and "tokens 246 k" in theirs
    axis = drawn(view, "loss").splitlines()[-1]
    assert axis.endswith("655k") and "4.10k" in axis


# --- in the app -----------------------------------------------------------------------------------


async def test_keys_and_mouse_move_the_crosshair_and_choose_another_run(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    runs = tmp_path / "runs"
    made.write(runs / "ours" / "events.ndjson", made.training(80))
    made.write(runs / "other" / "events.ndjson", made.finished())
    app = app_pilot.app_on(runs / "ours", made, start_screen="loss")
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("left", "h", "H")
        assert app.view.chart.crosshair == 68
        await pilot.press("right", "L")
        assert app.view.chart.crosshair == 79
        await pilot.click("#loss", offset=(60, 8))
        assert 35 <= (app.view.chart.crosshair or 0) <= 45
        await pilot.press("escape")
        assert app.view.chart.crosshair is None
        await pilot.press("v")
        await app_pilot.until(pilot, lambda: "other" in app_pilot.text_of(app))
        await pilot.press("down", "enter")
        await app_pilot.until(pilot, lambda: app.view.compared is not None)
        await app_pilot.until(pilot, lambda: "against other" in app_pilot.text_of(app))
        await pilot.press("v")
        await app_pilot.until(pilot, lambda: "no other run" in app_pilot.text_of(app))
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: app.view.compared is None)


async def test_the_curves_are_computed_anew_only_when_something_of_them_changed(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    made.write(tmp_path / "runs" / "ours" / "events.ndjson", made.training(80))
    app = app_pilot.app_on(tmp_path / "runs" / "ours", made, start_screen="loss")
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        panel = app.screen.query_one("#loss", PanelLines)
        before = panel._drawn
        app.redraw()
        assert panel._drawn is before
        await pilot.press("y")
        assert panel._drawn is not before and "log" in panel.text


async def test_attaching_to_a_run_ends_the_comparison(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    runs = tmp_path / "runs"
    for name in ("ours", "other"):
        made.write(runs / name / "events.ndjson", made.training(80))
    app = app_pilot.app_on(runs / "ours", made, start_screen="loss")
    async with app.run_test(size=(120, 40)) as pilot:
        await app_pilot.drawn(pilot)
        app.compare_with(runs / "other")
        await app_pilot.until(pilot, lambda: app.view.compared is not None)
        app.attach_to(runs / "other")
        await app_pilot.until(pilot, lambda: app.screen.NAME == "dashboard")
        await app_pilot.drawn(pilot)
        assert app.view.compared is None
