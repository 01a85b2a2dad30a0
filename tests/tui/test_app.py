"""The app: keys, screens, commands to the trainer, faults. Each test drives it as a user would."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from textual.binding import BindingType
from textual.pilot import Pilot
from textual.screen import Screen

from fluxtrain.telemetry.control import ControlServer
from fluxtrain.telemetry.rundir import RunDir
from fluxtui.actions import ACTIONS, find
from fluxtui.app import FluxApp
from fluxtui.screens.dialogs import HelpScreen, StopDialog
from fluxtui.screens.log import LogScreen
from fluxtui.screens.panel_screen import PanelGrid, PanelScreen
from fluxtui.screens.run_screen import RunScreen
from fluxtui.screens.runs import RunsScreen
from fluxtui.screens.settings import SettingsScreen
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.replay import ReplaySource
from fluxtui.themes import load_themes
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.wizard.screen import WizardScreen
from fluxtui.wizard.steps.step import DrawnStep
from fluxtui.wizard.steps.strategy import StrategyStep

SIZE = (120, 40)


@pytest.fixture
def run(tmp_path: Path, made: ModuleType) -> Path:
    """The directory of a run in the middle of its training."""
    made.write(tmp_path / "runs" / "demo" / "events.ndjson", made.training(80))
    return tmp_path / "runs" / "demo"


def app_on(run: Path, made: ModuleType, **options: Any) -> FluxApp:
    last_s = made.training(80)[-1].wall_s
    options.setdefault("wall_clock", lambda: last_s + 0.5)
    options.setdefault("sample_machine", False)
    options.setdefault("runs_folder", run.parent)
    return FluxApp(made.Alive(run), **options)


async def until(pilot: Pilot[None], true: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await pilot.pause(0.05)


async def drawn(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, FluxApp)
    seen: list[str] = []

    def still() -> bool:
        seen.append(text_of(app))
        return app.view.state.step is not None and len(seen) > 2 and len(set(seen[-3:])) == 1

    await until(pilot, still)


def text_of(app: FluxApp) -> str:
    """What the screen in front shows, without colours."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def notes(app: FluxApp) -> list[str]:
    return [f"{note.title}: {note.message}" for note in app._notifications]


async def test_the_dashboard_draws_a_followed_run(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        text = text_of(app)
        for part in ("RUNNING", "step 80/200", "Device memory", "C→G", "held-out", "forward"):
            assert part in text, part


@pytest.mark.parametrize(
    ("key", "name"),
    [("1", "dashboard"), ("2", "memory"), ("3", "transfer"), ("4", "loss"), ("5", "log"),
     ("6", "plan"), ("7", "runs")],
)  # fmt: skip
async def test_each_number_shows_its_screen(
    run: Path, made: ModuleType, key: str, name: str
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("7" if key == "1" else "1", key)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and name == app.screen.NAME)
        await until(pilot, lambda: "FluxTrain" in text_of(app))


@pytest.mark.parametrize("key", ["d", "q"])
async def test_detaching_leaves_the_app_alone(run: Path, made: ModuleType, key: str) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press(key)
        await until(pilot, lambda: not app.is_running)
    assert app.return_code == 0


async def test_every_action_of_the_registry_exists_in_the_app(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    for action in ACTIONS:
        name = action.do.split("(")[0]
        holders = (ScrollingLines, SettingsScreen) if action.in_lists else (app,)
        if action.in_wizard:
            holders = (WizardScreen, StrategyStep, DrawnStep)
        assert any(hasattr(holder, f"action_{name}") for holder in holders), name


# --- commands to the trainer ----------------------------------------------------------------------


class Trainer:
    """Answers commands as a trainer does."""

    def __init__(self, run: Path, answer: tuple[bool, str] = (True, "done")) -> None:
        self.heard: list[str] = []
        self._answer = answer
        self._server = ControlServer(RunDir(run).socket, self._hear)

    def _hear(self, command: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        self.heard.append(command)
        return self._answer

    def __enter__(self) -> Trainer:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()


@pytest.mark.parametrize(("key", "command"), [("p", "pause"), ("c", "checkpoint")])
async def test_a_key_reaches_the_trainer_and_its_answer_is_shown(
    run: Path, made: ModuleType, key: str, command: str
) -> None:
    app = app_on(run, made)
    with Trainer(run, (True, "after this step")) as trainer:
        async with app.run_test(size=SIZE) as pilot:
            await drawn(pilot)
            await pilot.press(key)
            await until(pilot, lambda: trainer.heard == [command])
            await until(pilot, lambda: f"{command}: after this step" in notes(app))


async def test_p_resumes_a_paused_run(run: Path, made: ModuleType) -> None:
    from fluxtrain.telemetry import events as ev

    paused = [*made.training(20), *made.stamped([ev.PhaseChanged(phase="paused")],
                                                made.training(80)[-1].wall_s)]  # fmt: skip
    made.write(run / "events.ndjson", paused)
    app = app_on(run, made)
    with Trainer(run) as trainer:
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: app.view.status.kind == "paused")
            await pilot.press("p")
            await until(pilot, lambda: trainer.heard == ["resume"])


async def test_stopping_asks_first(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    with Trainer(run) as trainer:
        async with app.run_test(size=SIZE) as pilot:
            await drawn(pilot)
            for answer in ("n", "escape", "enter"):
                await pilot.press("Q")
                await until(pilot, lambda: isinstance(app.screen, StopDialog))
                await pilot.press(answer)
                await until(pilot, lambda: isinstance(app.screen, PanelScreen))
            assert trainer.heard == []
            await pilot.press("Q")
            await until(pilot, lambda: isinstance(app.screen, StopDialog))
            await pilot.press("y")
            await until(pilot, lambda: trainer.heard == ["stop"])


async def test_a_refusal_and_a_missing_trainer_are_told(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("c")
        await until(pilot, lambda: any("no trainer runs" in note for note in notes(app)))
        with Trainer(run, (False, "it is saving already")):
            await pilot.press("c")
            await until(pilot, lambda: "checkpoint: it is saving already" in notes(app))


async def test_a_read_only_view_asks_for_nothing(run: Path, made: ModuleType) -> None:
    app = app_on(run, made, read_only=True)
    with Trainer(run) as trainer:
        async with app.run_test(size=SIZE) as pilot:
            await drawn(pilot)
            await pilot.press("p", "c", "Q")
            await until(pilot, lambda: len(notes(app)) == 3)
            assert all("read-only" in note for note in notes(app)) and trainer.heard == []
            assert "READ-ONLY" in text_of(app)


async def test_an_ended_run_takes_no_commands(run: Path, made: ModuleType) -> None:
    made.write(run / "events.ndjson", made.finished())
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("p")
        await until(pilot, lambda: any("has ended (finished)" in note for note in notes(app)))


async def test_a_recording_and_no_run_at_all_take_no_commands(run: Path, made: ModuleType) -> None:
    app = FluxApp(ReplaySource(run / "events.ndjson", None), sample_machine=False)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("p")
        await until(pilot, lambda: any("recording" in note for note in notes(app)))
    app = FluxApp(None, sample_machine=False, runs_folder=run.parent)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "no run attached" in text_of(app))
        await pilot.press("p")
        await until(pilot, lambda: any("no run is attached" in note for note in notes(app)))
        assert "no run attached" in text_of(app)


# --- the charts and the views ---------------------------------------------------------------------


async def test_chart_keys_change_the_chart(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("e", "y", "right_square_bracket")
        chart = app.view.chart
        assert (chart.smooth, chart.log_scale, chart.zoom) == (False, True, 0.5)
        await pilot.press(*["right_square_bracket"] * 20)
        assert app.view.chart.zoom == 1 / 64
        await pilot.press(*["left_square_bracket"] * 20)
        assert app.view.chart.zoom == 1.0


async def test_f_gives_the_focused_panel_the_screen_and_takes_it_back(
    run: Path, made: ModuleType
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        grid = app.screen.query_one(PanelGrid)
        await pilot.press("f")
        assert grid.maximised == "loss"
        await until(pilot, lambda: app.screen.query_one("#loss").size.height == 38)
        await pilot.press("f", "tab", "tab", "f")
        assert grid.maximised == "memory"
        await pilot.press("f")
        assert grid.maximised is None
        await until(pilot, lambda: app.screen.query_one("#memory").size.height == 5)


async def test_the_theme_key_goes_through_all_themes_and_back(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        seen, themes = [app.theme], len(load_themes()[0])
        for _ in range(themes):
            await pilot.press("t")
            seen.append(app.theme)
        assert len(set(seen)) == themes >= 5 and seen[0] == seen[-1]


async def test_an_unknown_theme_is_told_and_the_default_used(run: Path, made: ModuleType) -> None:
    app = app_on(run, made, theme_name="pink")
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        assert app.theme == "flux-dark"
        assert any("no theme 'pink'" in note for note in notes(app))


async def test_help_shows_every_key_of_the_screen_in_front_and_closes(
    run: Path, made: ModuleType
) -> None:
    app = app_on(run, made)
    async with app.run_test(size=(120, 80)) as pilot:
        await drawn(pilot)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await until(pilot, lambda: ACTIONS[0].about in text_of(app))
        text = text_of(app)
        here = [action for action in ACTIONS if action.works_on("dashboard")]
        assert all(action.about in text for action in here)
        assert "Crosshair" not in text and "Delete" not in text
        await pilot.press("p", "escape")  # no command leaves a dialog
        await until(pilot, lambda: isinstance(app.screen, PanelScreen))
        assert notes(app) == []


async def test_the_palette_runs_actions_by_name(run: Path, made: ModuleType) -> None:
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("colon")
        await until(pilot, lambda: "CommandPalette" in type(app.screen).__name__)
        await pilot.press(*"choice")
        await until(pilot, lambda: find("show_plan").about in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.NAME == "plan")


async def test_export_saves_a_picture(
    run: Path, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("x")
        await until(pilot, lambda: list(tmp_path.glob("*.svg")) != [])


# --- log and runs ---------------------------------------------------------------------------------


async def test_the_log_filters_and_follows(run: Path, made: ModuleType) -> None:
    app = app_on(run, made, start_screen="log")
    async with app.run_test(size=SIZE) as pilot:
        await drawn(pilot)
        await pilot.press("slash", *"checkpoint", "enter")
        await until(pilot, lambda: "held-out" not in text_of(app))
        text = text_of(app)
        assert "step 80: checkpoint" in text and "held-out" not in text
        assert "2 of 9 lines  with checkpoint" in text
        screen = app.screen
        assert isinstance(screen, LogScreen)
        await pilot.press("s")
        assert not screen.following
        await pilot.press("slash", "escape")
        await until(pilot, lambda: "held-out" in text_of(app))


async def test_a_long_log_scrolls_with_arrows_and_vim_keys(run: Path, made: ModuleType) -> None:
    from fluxtrain.telemetry import events as ev

    lines = [ev.LogWritten(level="info", text=f"line number {i:03}") for i in range(200)]
    made.write(run / "events.ndjson", made.stamped([made.hello(), made.step(1), *lines]))
    app = app_on(run, made, start_screen="log")
    async with app.run_test(size=(80, 24)) as pilot:
        await drawn(pilot)
        assert "line number 199" in text_of(app)
        body = app.screen.query_one("#body", ScrollingLines)
        bottom = body.offset_rows
        await pilot.press("k", "up")
        assert body.offset_rows == bottom - 2
        await pilot.press("g")
        assert body.offset_rows == 0
        await pilot.pause(0.6)  # news do not pull a reader away
        assert body.offset_rows == 0
        await pilot.press("pagedown", "G")
        assert body.offset_rows == bottom


async def test_the_runs_are_listed_and_enter_attaches(
    run: Path, made: ModuleType, tmp_path: Path
) -> None:
    other = run.parent / "other"
    made.write(other / "events.ndjson", made.finished())
    app = app_on(run, made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "other" in text_of(app) and "demo" in text_of(app))
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        names = [Path(one.path).name for one in screen.runs]
        for _ in range(names.index("other")):
            await pilot.press("j")
        await pilot.press("enter")
        await until(pilot, lambda: app.run_dir == other)
        await until(pilot, lambda: app.view.status.kind == "finished")
        assert isinstance(app.screen, PanelScreen)


async def test_no_runs_say_how_to_make_one(tmp_path: Path) -> None:
    app = FluxApp(None, start_screen="runs", runs_folder=tmp_path, sample_machine=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "n makes one" in text_of(app))


# --- the wizard's place ---------------------------------------------------------------------------


async def test_the_wizard_is_asked_first_and_may_be_left(tmp_path: Path) -> None:
    class Asking(Screen[None]):
        BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "back")]

    app = FluxApp(
        None, start_screen="wizard", make_wizard=Asking, runs_folder=tmp_path, sample_machine=False
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: isinstance(app.screen, Asking))
        await pilot.press("d", "1")  # the app's keys are the wizard's letters here
        assert isinstance(app.screen, Asking) and app.is_running
        await pilot.press("escape")
        await until(pilot, lambda: app._exit)  # there is no run behind it


# --- faults ---------------------------------------------------------------------------------------


async def test_a_flood_does_not_keep_keys_waiting(run: Path, made: ModuleType) -> None:
    from fluxtui.sources.source import Batch
    from fluxtui.state.link import Link

    class Flood(made.Alive):
        polls = 0

        def poll(self) -> Batch:
            self.polls += 1
            time.sleep(0.02)
            return Batch(made.training(40)[:250], Link(process="alive"))

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
        assert len(rows) == 1 and "RUNNING" in rows[0] and "80/200" in rows[0]


async def test_a_killed_trainer_is_told(run: Path, made: ModuleType) -> None:
    (run / "engine.log").write_text("Killed\n")
    app = FluxApp(JournalSource(run), sample_machine=False, runs_folder=run.parent)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.view.status.kind == "dead")
        await until(pilot, lambda: "is gone after step 80: Killed" in text_of(app))
        text = text_of(app)
        assert "DEAD" in text
        assert "1.50 GB/s" not in text  # its rates are of then, not of now


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
        "fluxtui.screens.dialogs", "fluxtui.screens.settings", "fluxtui.tables",
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
