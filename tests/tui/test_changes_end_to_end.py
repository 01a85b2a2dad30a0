"""A real trainer that is changed from outside, and the app that shows it and takes it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from fluxtrain.cli import main
from fluxtrain.errors import FluxTrainError
from fluxtrain.events.events import ChangeApplied, StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.control import CommandAnswer, send_command
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui.app import FluxApp
from fluxtui.screens.plan import plan_lines
from fluxtui.sources.journal import JournalSource
from tests.engine import forked

PATIENCE_S = 120.0


def ask(run: RunDir, command: str, **arguments: int) -> CommandAnswer:
    """The trainer's answer, as soon as it listens and trains."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = send_command(run.socket, command, dict(arguments))
            if "still loading" not in answer.message:
                return answer
        except FluxTrainError:
            pass
        assert time.monotonic() < deadline_s, "the trainer does not answer"
        time.sleep(0.1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A tiny demo run that would go on for ever."""
    settings = ("data.sequence_length=16", "train.batch_rows=2", "train.evaluate_every=end",
                "train.checkpoint_every=end", "data.held_out=0.002")  # fmt: skip
    sets = [part for setting in settings for part in ("--set", setting)]
    command = ["train", "--demo", "--steps", "100000", *sets, "--device", "cpu"]
    with forked.running(main, [*command, "--run-dir", str(tmp_path / "run")]):
        yield RunDir(tmp_path / "run")


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await pilot.pause(0.05)


async def test_the_app_follows_a_change_of_a_real_trainer_and_u_takes_it_back(run: RunDir) -> None:
    assert ask(run, "apply", resident_blocks=4).ok
    app = FluxApp(JournalSource(run.path), start_screen="plan", sample_machine=False)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.view.state.changes.now == {"resident_blocks": 4})
        text = "\n".join("".join(t for t, _ in line) for line in plan_lines(app.view, 100))
        assert "resident_blocks 0 → 4  made after step" in text
        assert "4  planned 0" in text
        await pilot.press("u")
        await until(pilot, lambda: app.view.state.changes.now == {"resident_blocks": 0})
    refused = ask(run, "apply", resident_blocks=400)
    assert not refused.ok
    assert "use 0 to" in refused.message
    events = list(read_events(run.journal))
    made, undone = [event for event in events if isinstance(event, ChangeApplied)]
    assert (made.why, undone.why) == ("asked", "undo")
    losses = {step.step: step.loss for step in events if isinstance(step, StepFinished)}
    assert len(losses) >= undone.step > made.step - 1
