"""Numbers that no good run has: what is not finite, too large or too late is said as what it is."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtrain.units import power_text
from fluxtui.panels import PANELS
from fluxtui.panels.memory import heading as memory_heading
from fluxtui.panels.panel import gain_text, share_text, whole_share, whole_text
from fluxtui.panels.progress import eta
from fluxtui.plots.bars import gauge
from fluxtui.screens.chrome import header_line
from fluxtui.screens.panel_screen import framed
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line

NAN, INFINITE = float("nan"), float("inf")


def text(line: Line) -> str:
    return "".join(part for part, _ in line)


def after_step(made: ModuleType, late_s: float = 0.5, **changes: Any) -> View:
    """A live run whose newest step is like no other."""
    events = made.training(30)
    at = max(i for i, event in enumerate(events) if isinstance(event, ev.StepFinished))
    events[at] = replace(events[at], **changes)
    state = FoldedRun().after_all(events)
    wall_s = (state.last_wall_s or 0.0) + late_s
    return View(state=state, link=Link(process="alive"), wall_s=wall_s)


def everything(view: View) -> str:
    """What all panels say at two sizes."""
    lines: list[Line] = []
    for width, height in ((116, 14), (37, 4)):
        lines += [one for p in PANELS.values() for one in framed(p, view, width, height, "box")]
    return "\n".join(map(text, lines))


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
def test_a_number_without_a_value_is_not_taken_for_one(value: float) -> None:
    assert share_text(value) == whole_share(value) == gain_text(value) == whole_text(value) == "-"
    assert power_text(value) == str(value)


def test_what_is_more_than_all_is_not_called_all(made: ModuleType) -> None:
    assert (share_text(2.304), share_text(0.9996), share_text(-0.25)) == ("230%", "100%", "-25.0%")
    assert gauge(NAN, 4, "stall") == gauge(None, 4, "stall")
    events = made.training(10)
    peak = replace(made.memory(11), device_peak_bytes=3 * int(0.62 * (1 << 30)))
    state = FoldedRun().after_all([*events, replace(peak, wall_s=events[-1].wall_s)])
    heading = memory_heading(View(state=state, wall_s=events[-1].wall_s), 100)
    assert "peak over by 200%" in text(heading)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": NAN},
        {"learning_rate": INFINITE},
        {"eta_s": NAN},
        {"eta_s": INFINITE},
        {"eta_s": 1e30},
        {"eta_s": float(2**62)},
        {"eta_spread_s": -INFINITE},
        {"eta_spread_s": NAN},
        {"step_s": 1e308},
        {"stalls_s": {"weights": -1e308, "update": NAN}},
        {"phases_s": {"data": INFINITE, "forward": 0.3}},
        {"phases_s": {"data": 1e308, "forward": 1e308}},
    ],
)
def test_a_step_with_an_impossible_number_is_drawn_without_it(
    made: ModuleType, changes: dict[str, Any]
) -> None:
    shown = everything(after_step(made, **changes))
    assert "nan%" not in shown and "inf%" not in shown


# --- when it ends ---------------------------------------------------------------------------------


def test_the_eta_counts_down_between_steps_and_by_no_more_than_the_next_one(
    made: ModuleType,
) -> None:
    events = [made.hello(), made.step(80, total=90, step_s=10.0)]
    state = FoldedRun().after_all(made.stamped(events))

    def left(since_s: float) -> str:
        view = View(state=state, link=Link(process="alive"), wall_s=made.START_S + 0.1 + since_s)
        return text(eta(view)).split(" ±")[0]

    assert [left(s) for s in (0, 4, 9)] == ["ETA 1m 40s", "ETA 1m 36s", "ETA 1m 31s"]
    beating = [
        ev.Heartbeat(phase="evaluating", step=80, wall_s=made.START_S + s) for s in range(40)
    ]
    state = state.after_all(beating)
    assert left(39) == "ETA 1m 30s", "nine steps are still to come"


def test_an_end_that_is_overdue_has_an_hour_that_is_to_come(made: ModuleType) -> None:
    view = after_step(made, late_s=8.0, eta_s=5.0, step=199, total_steps=200)
    now = time.strftime("%H:%M", time.localtime(view.wall_s))
    assert text(eta(view)).endswith(f"at {now}") and "ETA 0 s" in text(eta(view))


def test_a_clock_that_was_set_back_does_not_make_a_run_up_for_less_than_nothing(
    made: ModuleType,
) -> None:
    view = after_step(made, late_s=-7200.0)
    assert "up 0 s" in text(header_line(view, 160))


# --- the machine as a table -----------------------------------------------------------------------
