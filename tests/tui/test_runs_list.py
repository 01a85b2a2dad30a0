"""Screen 7 as a list: the cursor is on a run, and the list is filtered and sorted as in k9s."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from fluxtrain.events.run_folder import states
from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary, list_runs
from fluxtrain.events.run_folder.states import state_of_exit, state_word
from fluxtui.screens.dialogs import QuestionDialog
from fluxtui.screens.run_actions import way_on
from fluxtui.screens.run_rows import STATE_ROLES, RunOrder, columns, run_row
from fluxtui.screens.runs import RunsScreen
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link, status_of

SIZE = (120, 40)


def summary(name: str, **changes: Any) -> RunSummary:
    facts: dict[str, Any] = {
        "run_id": name, "path": f"/runs/{name}", "state": "finished", "started_s": 0.0,
        "updated_s": 100.0,
    }  # fmt: skip
    return RunSummary(**(facts | changes))


RUNS = [
    summary("b", loss=2.0, step=9, model="Qwen"),
    summary("a", loss=None, step=None, state="dead", method="qlora"),
    summary("c", loss=1.0, step=300, state="running", eta_s=4.0, phase="paused", model="llama"),
]


def names(order: RunOrder) -> str:
    return "".join(run.run_id for run in order.of(RUNS, 101.0))


@pytest.mark.parametrize(
    ("words", "left"),
    [("", "bac"), ("qwen", "b"), ("dead", "a"), ("paused", "c"), ("QLORA", "a"), ("!dead", "bc"),
     ("runs !qwen !dead", "c"), ("nothing", ""), ("!", "")],
)  # fmt: skip
def test_a_filter_keeps_runs_with_all_words_and_without_those_after_a_mark(
    words: str, left: str
) -> None:
    assert names(RunOrder(words=words)) == left


def test_the_columns_head_has_an_arrow_in_the_width_of_its_name() -> None:
    for width in (60, 80, 120):
        plain, sorted_ = columns(width), columns(width, "step", True)
        text = "".join(part for part, _ in sorted_)
        assert "step↓" in text and len(text) == len("".join(part for part, _ in plain)) == width
    assert "loss↑" in "".join(part for part, _ in columns(120, "loss", False))


# --- words ----------------------------------------------------------------------------------------


def test_every_state_has_a_colour_and_a_word_that_the_dashboard_has_too(
    made: ModuleType, tmp_path: Path
) -> None:
    assert set(STATE_ROLES) == set(get_args(states.RunState))
    from fluxtrain.events import events as ev

    def done(code: int) -> ev.Done:
        return ev.Done(exit_code=code, step=3, seconds=1.0, loss=None, evaluation_loss=None,
                       model_path=None)  # fmt: skip

    endings: dict[str, list[Any]] = {
        "finished": [done(0)], "stopped": [done(130)], "failed": [done(1)],
        "refused": [ev.Failed(exit_code=2, kind="BadInput", message="no", refused=True)],
    }  # fmt: skip
    for word, events in endings.items():
        journal = tmp_path / word / "events.ndjson"
        made.write(journal, [*made.training(3), *events])
        state = FoldedRun().after_all([*made.training(3), *events])
        listed = RunDir(journal.parent).summary()
        assert status_of(state, Link(), 0.0).word.lower() == listed.word() == word
        row = "".join(text for text, _ in run_row(listed, None, time.time(), 120))
        assert f" {word} " in row
    for phase in ("paused", "saving", "training"):
        now_s = made.training(3)[-1].wall_s + 1
        events = [*made.training(3), ev.PhaseChanged(phase=phase, wall_s=now_s)]
        shown = status_of(FoldedRun().after_all(events), Link(process="alive"), now_s + 1).word
        assert shown.lower() == state_word("running", phase, 1.0)
        late = status_of(FoldedRun().after_all(events), Link(process="alive"), now_s + 60).word
        assert late.lower() == state_word("running", phase, 60.0) == "stalled"


def test_headless_lines_the_log_and_the_trainer_say_the_same_word(made: ModuleType) -> None:
    from fluxtrain.events import events as ev
    from fluxtrain.events.console import line
    from fluxtui.headless import event_line

    for code in (0, 130, 143, 1):
        event = ev.Done(exit_code=code, step=3, seconds=1.0, loss=None, evaluation_loss=None,
                        model_path=None)  # fmt: skip
        word = state_of_exit(code)
        log = FoldedRun().after_all([*made.training(3), event]).log
        assert list(log)[-1].text.startswith(f"{word} after step 3")
        assert event_line(event).startswith(f"{word} after step 3")
        assert str(line(event)).startswith(f"{word} after step 3")


# --- in the app -----------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, made: ModuleType) -> Path:
    """Five runs; `three` is the one on screen, `two` was stopped."""
    root = tmp_path / "runs"
    for number, name in enumerate(("one", "two", "three", "four", "five")):
        events = made.training(80) if name == "three" else made.finished()
        made.write(root / name / "events.ndjson", events)
        config = {"model": {"path": "demo"}, "data": {"path": "demo"}}
        (root / name / "run.json").write_text(json.dumps({"config": config}))
        if name == "two":
            (root / name / "result.json").write_text(json.dumps({"exit_code": 130}))
            (root / name / "checkpoints" / "step-00000120").mkdir(parents=True)
        del number
    return root


async def on_list(pilot: Any, app: Any, app_pilot: Any, count: int = 5) -> RunsScreen:
    await app_pilot.until(
        pilot, lambda: isinstance(app.screen, RunsScreen) and len(app.screen.runs) == count
    )
    await app_pilot.drawn(pilot)
    screen: RunsScreen = app.screen
    return screen


def put_on(screen: RunsScreen, name: str) -> None:
    """The cursor on a run, as its keys do."""
    body = screen.query_one("#body")
    at = [run.run_id for run in screen.runs].index(name)
    body.action_move(at - body.cursor)


async def test_the_cursor_starts_on_the_run_one_came_from(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "three", made)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        for _ in range(2):
            await pilot.press("7")
            screen = await on_list(pilot, app, app_pilot)
            await app_pilot.until(
                pilot, lambda s=screen: s.selected and s.selected.run_id == "three"
            )
            await pilot.press("g")
            await pilot.press("j" if screen.selected.run_id == "three" else "g")
            assert screen.selected.run_id != "three"
            await pilot.press("1")
            await app_pilot.until(pilot, lambda: not isinstance(app.screen, RunsScreen))


async def test_a_run_elsewhere_is_in_the_list_while_it_is_on_screen(
    runs: Path, made: ModuleType, app_pilot: Any, tmp_path: Path
) -> None:
    made.write(tmp_path / "elsewhere" / "events.ndjson", made.training(80))
    app = app_pilot.app_on(tmp_path / "elsewhere", made, start_screen="runs", runs_folder=runs)
    async with app.run_test(size=SIZE) as pilot:
        screen = await on_list(pilot, app, app_pilot, 6)
        assert screen.selected.run_id == "elsewhere"


async def test_no_action_reaches_a_run_that_the_cursor_was_not_put_on(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "three", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        screen = await on_list(pilot, app, app_pilot)
        put_on(screen, "four")
        four = next(run for run in screen.runs if run.run_id == "four")
        screen._show([run for run in screen._all if run.run_id != "four"])
        assert screen.selected is None
        for key in ("D", "r", "v", "e", "enter"):
            await pilot.press(key)
        assert app.screen is screen and app.run_dir == runs / "three"
        assert app_pilot.notes(app) == []
        await app_pilot.until(pilot, lambda: "is gone: choose another" in app_pilot.text_of(app))
        await pilot.press("j")
        assert screen.selected is not None
        screen._show([four, *screen._all])
        assert screen.selected.run_id != "four", "it goes with the newly chosen one"


async def test_the_cursor_goes_with_its_run_when_the_list_is_sorted(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "three", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        screen = await on_list(pilot, app, app_pilot)
        put_on(screen, "one")
        await pilot.press("N")
        assert [run.run_id for run in screen.runs] == ["five", "four", "one", "three", "two"]
        await app_pilot.until(pilot, lambda: "run↑" in app_pilot.text_of(app))
        assert screen.selected.run_id == "one"
        await pilot.press("N")
        await app_pilot.until(pilot, lambda: "run↓" in app_pilot.text_of(app))
        assert screen.runs[0].run_id == "two" and screen.selected.run_id == "one"
        await pilot.press("U")
        assert screen.order.column == "state"
        await pilot.press("O")
        await app_pilot.until(pilot, lambda: "↑" not in app_pilot.text_of(app).split("\n")[1])


async def test_a_filter_takes_the_first_run_and_escape_gives_the_old_one_back(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "three", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        screen = await on_list(pilot, app, app_pilot)
        await pilot.press("slash", *"stopped")
        await app_pilot.until(pilot, lambda: [run.run_id for run in screen.runs] == ["two"])
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: screen.focused is screen.query_one("#body"))
        assert screen.selected.run_id == "two"
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: len(screen.runs) == 5)
        await pilot.press("slash", *"zebra")
        await app_pilot.until(pilot, lambda: "none of 5 runs has 'zebra'" in app_pilot.text_of(app))


async def test_resume_asks_first_and_names_step_and_checkpoint(
    runs: Path, made: ModuleType, app_pilot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def start(arguments: Any, run_dir: Any) -> Any:
        started.append(str(run_dir))
        raise OSError("not in a test")

    monkeypatch.setattr("fluxtrain.events.run_folder.launch.start_trainer", start)
    app = app_pilot.app_on(runs / "three", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        screen = await on_list(pilot, app, app_pilot)
        for answer in ("n", "escape", "enter"):
            put_on(screen, "two")
            await pilot.press("r")
            await app_pilot.until(pilot, lambda: isinstance(app.screen, QuestionDialog))
            await app_pilot.until(pilot, lambda: "Resume two?" in app_pilot.text_of(app))
            assert "checkpoint, step 120" in " ".join(app_pilot.text_of(app).split())
            await pilot.press(answer)
            await app_pilot.until(pilot, lambda: app.screen is screen)
        assert started == []
        await pilot.press("r")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, QuestionDialog))
        await pilot.press("y")
        await app_pilot.until(pilot, lambda: started == [str(runs / "two")])


def test_a_run_without_a_checkpoint_goes_on_from_its_beginning(runs: Path) -> None:
    [one] = [run for run in list_runs(runs) if run.run_id == "one"]
    assert "from its beginning" in way_on(one)
    assert "It was refused: no." in way_on(summary("x", state="refused", message="no"))
