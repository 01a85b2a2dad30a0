"""Advice and changes: the fold over their events, the words, the keys to a trainer's socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.control import ControlServer
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui.app import FluxApp
from fluxtui.panels.trials import headline, trial_line, why_not
from fluxtui.screens.plan import plan_lines
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.changes import Changes, TriedChange, ranked
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, width_of

RESIDENT = ev.AdviceGiven(
    text="30% of the last 20 steps went into waiting for copies of weights",
    gain="8.0% of the step time", how="resident_blocks=8", id="resident",
    apply={"resident_blocks": 8}, gain_share=0.08,
)  # fmt: skip
IN_BACKWARD = ev.AdviceGiven(
    text="12% of the last 20 steps went into waiting for AdamW on the host",
    gain="12.0% of the step time", how="train.max_grad_norm=null", id="backward",
    gain_share=0.12,
)  # fmt: skip
MADE = ev.ChangeApplied(
    step=80, name="resident_blocks", before=2, after=8, why="advice", advice="resident",
    predicted_gain=0.08,
)  # fmt: skip


def measured(gain: float | None, verdict: Any = "kept", step: int = 101) -> ev.ChangeMeasured:
    return ev.ChangeMeasured(
        step=step, name="resident_blocks", before=2, after=8, verdict=verdict,
        measured_gain=gain, predicted_gain=0.08, advice="resident", before_s=1.0,
        after_s=None if gain is None else 1.0 - gain, steps_before=20, steps_after=20,
    )  # fmt: skip


def undone(why: Any = "wrong", step: int = 101) -> ev.ChangeApplied:
    return ev.ChangeApplied(step=step, name="resident_blocks", before=8, after=2, why=why)


def words(*lines: Line) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def view_after(made: ModuleType, *events: ev.AnyEvent, **options: Any) -> View:
    """A running training after more events."""
    known = made.training(80)
    more = made.stamped(events, known[-1].wall_s + 0.1)
    return View(
        state=FoldedRun().after_all([*known, *more]),
        link=Link(process="alive"),
        wall_s=known[-1].wall_s + 0.5,
        **options,
    )


# --- the fold -------------------------------------------------------------------------------------


def test_newer_advice_about_the_same_takes_the_place_of_the_older() -> None:
    from msgspec.structs import replace

    state = FoldedRun().after_all([RESIDENT, IN_BACKWARD, replace(RESIDENT, gain_share=0.2)])
    assert [(one.id, one.gain_share) for one in ranked(state.advice)] == [
        ("resident", 0.2), ("backward", 0.12),
    ]  # fmt: skip
    state = state.after(ev.AdviceWithdrawn(id="resident"))
    assert [one.id for one in state.advice] == ["backward"]


def test_a_change_goes_from_asked_to_measured() -> None:
    asked = ev.CommandAnswered(
        command="apply", ok=True, message="goes", arguments={"advice": "resident"}
    )
    state = FoldedRun().after(asked)
    assert state.changes.asked is asked
    state = state.after(MADE)
    assert (state.changes.asked, state.changes.now) == (None, {"resident_blocks": 8})
    state = state.after(ev.MeasuringChange(name="resident_blocks", counted=7, wanted=20))
    assert state.changes.newest is not None
    assert (state.changes.newest.counted, state.changes.newest.wanted) == (7, 20)
    state = state.after(measured(0.06))
    assert state.changes.newest is not None and state.changes.newest.measured == measured(0.06)


def test_a_new_process_starts_from_its_configuration(made: ModuleType) -> None:
    state = FoldedRun().after_all([*made.training(80), RESIDENT, MADE])
    state = state.after_all(made.stamped([made.hello(pid=9, first_step=40)], made.START_S + 900))
    assert (state.advice, state.changes) == ((), Changes())


def test_changes_are_in_the_log_with_their_numbers(made: ModuleType) -> None:
    state = FoldedRun().after_all([MADE, measured(0.01, "wrong"), undone()])
    told = [(entry.level, entry.text) for entry in state.log if entry.kind == "change"]
    assert told[0] == ("info", "after step 80: resident_blocks 2 -> 8, as advised")
    assert told[1] == ("warning", "resident_blocks 2 -> 8: faster by 1.0%, +8.0% predicted")
    assert "it gave too little" in told[2][1]


# --- the words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (TriedChange(MADE), "made after step 80"),
        (TriedChange(MADE, counted=7, wanted=20), "made after step 80, measuring 7/20"),
        (
            TriedChange(MADE, measured=measured(0.06)),
            "faster by 6.0%, +8.0% predicted (1.00 s → 940 ms",
        ),
        (TriedChange(MADE, measured=measured(None, "unknown")), "too few steady steps"),
        (
            TriedChange(MADE, measured=measured(0.01, "wrong"), undone=undone()),
            "wrong: faster by 1.0%, +8.0% predicted, undone after step 101",
        ),
        (TriedChange(MADE, undone=undone("undo", 83)), "not measured, undone after step 83"),
        (
            TriedChange(
                ev.ChangeApplied(step=5, name="chunk_rows", before=8, after=4, why="memory")
            ),
            "chunk_rows 8 → 4  device memory ran out after step 5",
        ),
    ],
)
def test_a_trial_says_where_it_is(trial: TriedChange, said: str) -> None:
    assert said in words(trial_line(trial))


def test_the_dashboard_tells_the_best_live_advice_then_the_change_then_its_verdict(
    made: ModuleType,
) -> None:
    assert headline(view_after(made), 100) == ()  # advice without a live change stays on its screen
    best = headline(view_after(made, IN_BACKWARD, RESIDENT), 100)
    assert "+8.0%  resident_blocks=8  a applies it" in words(best)
    assert width_of(best) == 100
    asked = ev.CommandAnswered(command="apply", ok=True, message="goes from 2 to 8")
    assert "asked: goes from 2 to 8" in words(headline(view_after(made, RESIDENT, asked), 100))
    counting = ev.MeasuringChange(name="resident_blocks", counted=7, wanted=20)
    assert "measuring 7/20" in words(headline(view_after(made, MADE, counting), 100))
    seen = [made.step(number) for number in range(81, 105)]
    assert "faster by 6.0%" in words(headline(view_after(made, MADE, *seen, measured(0.06)), 100))
    later = [made.step(number) for number in range(81, 125)]
    assert headline(view_after(made, MADE, measured(0.06), *later), 100) == ()


def test_the_plan_screen_marks_the_selected_advice_and_the_settings_that_changed(
    made: ModuleType,
) -> None:
    text = words(*plan_lines(view_after(made, RESIDENT, IN_BACKWARD, advice_at=1), 100))
    assert text.index("+12.0%  train.max_grad_norm=null  for the next run") < text.index(
        "▸ +8.0%  resident_blocks=8  a applies it"
    )
    changed = words(*plan_lines(view_after(made, MADE, measured(0.06)), 100))
    assert "Changed while it trains" in changed
    assert "8  planned 2" in changed


def test_the_prediction_is_compared_with_what_is_measured_so_far_and_at_the_end(
    made: ModuleType,
) -> None:
    from msgspec.structs import replace

    planned = replace(made.planned(), step_s=1.0, binds="the GPU", constants="a probe of today")
    running = view_after(made, planned)
    text = words(*plan_lines(running, 100))
    assert "so far" in text and "bound by the GPU; a probe of today" in text
    assert [row.split()[2:] for row in text.splitlines() if "median step" in row] == [
        ["1", "s", "900", "ms", "+11.1%"]
    ]
    row = ev.Compared(quantity="step_s", predicted=1.0, measured=0.8, error=0.25)
    ended = words(*plan_lines(view_after(made, planned, ev.PlanChecked(rows=(row,))), 100))
    assert "+25.0%" in ended and "so far" not in ended


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"read_only": True}, "this view is read-only"), ({}, "")],
)
def test_the_plan_screen_says_why_nothing_can_be_applied(
    made: ModuleType, options: dict[str, Any], reason: str
) -> None:
    view = view_after(made, RESIDENT, **options)
    assert why_not(view) == reason
    text = words(*plan_lines(view, 100))
    assert ("cannot be applied" in text) == bool(reason)
    assert (
        ("a applies it" in text) == ("a applies it" in words(headline(view, 100))) != bool(reason)
    )


# --- the keys -------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, made: ModuleType) -> Path:
    known = made.training(80)
    more = made.stamped([RESIDENT, IN_BACKWARD], known[-1].wall_s + 0.1)
    made.write(tmp_path / "runs" / "demo" / "events.ndjson", [*known, *more])
    return tmp_path / "runs" / "demo"


@pytest.fixture
def trainer(run: Path) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What a trainer behind the run's socket is asked for."""
    heard: list[tuple[str, dict[str, Any]]] = []

    def answer(command: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        heard.append((command, arguments))
        return True, "goes from 2 to 8 after this step"

    server = ControlServer(RunDir(run).socket, answer)
    server.start()
    yield heard
    server.close()


def app_on(run: Path, made: ModuleType, **options: Any) -> FluxApp:
    last_s = made.training(80)[-1].wall_s
    source = options.pop("source", None) or made.Alive(run)
    return FluxApp(
        source, wall_clock=lambda: last_s + 0.6, sample_machine=False, runs_folder=run.parent,
        **options,
    )  # fmt: skip


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await pilot.pause(0.05)


def notes(app: FluxApp) -> list[str]:
    return [f"{note.title}: {note.message}" for note in app._notifications]


async def test_a_applies_the_best_live_advice_from_the_dashboard_and_u_takes_it_back(
    run: Path, made: ModuleType, trainer: list[Any]
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: len(app.view.state.advice) == 3)
        await pilot.press("a")
        await until(pilot, lambda: len(trainer) == 1)
        await until(pilot, lambda: "apply: goes from 2 to 8 after this step" in notes(app))
        await pilot.press("u")
        await until(pilot, lambda: len(trainer) == 2)
        assert trainer == [("apply", {"advice": "resident"}), ("undo", {})]


async def test_on_the_plan_screen_the_selected_advice_is_applied(
    run: Path, made: ModuleType, trainer: list[Any]
) -> None:
    app = app_on(run, made, start_screen="plan")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(app.view.state.advice) == 3)
        await pilot.press("a")  # the best of all is for the next run
        await until(pilot, lambda: any("for the next run: train.max" in n for n in notes(app)))
        assert trainer == []
        await pilot.press("right", "a")
        await until(pilot, lambda: trainer == [("apply", {"advice": "resident"})])
        await pilot.press("l", "l", "l", "h", "left", "left")
        assert app.view.advice_at == 0


@pytest.mark.parametrize("kind", ["read-only", "recording"])
async def test_who_only_watches_is_told_why_nothing_is_applied(
    run: Path, made: ModuleType, trainer: list[Any], kind: str
) -> None:
    source = ReplaySource(run / "events.ndjson", None) if kind == "recording" else None
    app = app_on(run, made, source=source, read_only=kind == "read-only")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: len(app.view.state.advice) == 3)
        await pilot.press("a", "u")
        await until(pilot, lambda: len(notes(app)) >= 2)
        assert all(kind in note for note in notes(app))
        assert trainer == []
