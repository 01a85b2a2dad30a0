"""What the app asks the trainer for, and what it says of the answers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.events.run_folder.control import ControlServer
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui.app import FluxApp
from fluxtui.screens.dialogs import QuestionDialog
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.sources.replay import ReplaySource
from tests.tui.app_pilot import SIZE, app_on, drawn, notes, text_of, until


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
    from fluxtrain.events import events as ev

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
                await until(pilot, lambda: isinstance(app.screen, QuestionDialog))
                await pilot.press(answer)
                await until(pilot, lambda: isinstance(app.screen, PanelScreen))
            assert trainer.heard == []
            await pilot.press("Q")
            await until(pilot, lambda: isinstance(app.screen, QuestionDialog))
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
