"""A clock on the wall that is set while a run trains changes no age, no rate and no time left."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtui.panels.progress import eta
from fluxtui.screens.chrome import link_notes
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View

BOOT = "a-boot"
MONOTONIC_S = 5000.0  # of the trainer's first event


def told(made: ModuleType, set_by_s: float, at: int | None = None) -> list[ev.AnyEvent]:
    """A training whose wall clock is set before its event number `at`; None: before the last."""
    events = made.stamped([replace(made.hello(total_steps=200), boot=BOOT), *made.training(60)[1:]])
    at = len(events) - 1 if at is None else at
    return [
        replace(event, t_s=MONOTONIC_S + event.t_s,
                wall_s=event.wall_s + (set_by_s if number >= at else 0.0))
        for number, event in enumerate(events)
    ]  # fmt: skip


def seen(events: list[ev.AnyEvent], boot: str = BOOT, later_s: float = 2.0) -> View:
    last = events[-1]
    return View(
        state=FoldedRun().after_all(events), link=Link(process="alive"), boot=boot,
        wall_s=last.wall_s + later_s, monotonic_s=last.t_s + later_s,
    )  # fmt: skip


@pytest.mark.parametrize("set_by_s", [0.0, 3600.0, -3600.0, 86400.0 * 400])
def test_setting_the_clock_changes_neither_status_nor_ages_nor_the_time_left(
    made: ModuleType, set_by_s: float
) -> None:
    events = told(made, set_by_s)
    view, steady = seen(events), seen(told(made, 0.0))
    assert view.status.kind == "running"
    assert view.age_s(view.state.step) == pytest.approx(steady.age_s(steady.state.step), abs=0.01)
    assert view.fresh(view.state.memory) is not None
    assert eta(view)[1] == eta(steady)[1]
    assert link_notes(view) == link_notes(steady)
    assert view.state.moves_per_minute == pytest.approx(steady.state.moves_per_minute)


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_after_the_newest_event_makes_nothing_old(
    made: ModuleType, set_by_s: float
) -> None:
    events = told(made, 0.0)
    view = seen(events)
    moved = View(
        state=view.state, link=view.link, boot=BOOT,
        wall_s=view.wall_s + set_by_s, monotonic_s=view.monotonic_s,
    )  # fmt: skip
    assert moved.status == view.status
    assert moved.age_s(moved.state.step) == view.age_s(view.state.step)


def test_a_trainer_that_is_silent_is_stalled_although_the_clock_was_set_back(
    made: ModuleType,
) -> None:
    view = seen(told(made, 0.0), later_s=100.0)
    assert View(
        state=view.state, link=view.link, boot=BOOT,
        wall_s=view.wall_s - 3600.0, monotonic_s=view.monotonic_s,
    ).status.kind == "stalled"  # fmt: skip


@given(
    at=st.integers(1, 300), set_by_s=st.floats(-1e9, 1e9, allow_nan=False),
    back_s=st.floats(-1e4, 1e4),
)  # fmt: skip
def test_times_in_the_state_never_run_backwards_whatever_the_clock_does(
    made: ModuleType, at: int, set_by_s: float, back_s: float
) -> None:
    events = told(made, set_by_s, at)
    events = [
        replace(e, wall_s=e.wall_s + back_s) if n > at + 40 else e for n, e in enumerate(events)
    ]
    state = FoldedRun().after_all(events)
    times = [sample.wall_s for sample in state.memories]
    assert all(0.0 <= after - before < 60.0 for before, after in pairwise(times))


def test_a_recording_of_a_run_whose_clock_was_set_plays_at_its_own_speed(
    made: ModuleType, tmp_path: Path
) -> None:
    journal = tmp_path / "events.ndjson"
    events = told(made, 3600.0, at=100)
    made.write(journal, events)
    now_s = 0.0
    source = ReplaySource(journal, clock=lambda: now_s)
    assert len(source.poll().events) == 1
    now_s = events[-1].t_s - events[0].t_s + 0.01
    source.poll()
    assert source.over
