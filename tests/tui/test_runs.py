"""Screen 7: what can be done with a run of the list, and what must never be deleted."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.removal import check_removable, contents, remove_run
from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary, list_runs
from fluxtui.answers.answers import Answers
from fluxtui.answers.launching import prepare
from fluxtui.screens.dialogs import QuestionDialog
from fluxtui.screens.run_actions import cannot_resume
from fluxtui.screens.run_rows import columns, left_text, run_detail, run_row
from fluxtui.screens.runs import RunsScreen
from fluxtui.state.view import View
from fluxtui.widgets.spans import width_of

SIZE = (120, 40)


@pytest.fixture
def runs(tmp_path: Path, made: ModuleType) -> Path:
    """A folder with a run in its middle and a finished one with a checkpoint."""
    root = tmp_path / "runs"
    made.write(root / "ours" / "events.ndjson", made.training(80))
    made.write(root / "other" / "events.ndjson", made.finished())
    (step := root / "other" / "checkpoints" / "step-00000200").mkdir(parents=True)
    (step / "shard-00000.safetensors").write_bytes(b"x" * 5000)
    config = {"model": {"path": "demo"}, "data": {"path": "demo"}, "train": {"steps": 77}}
    (root / "other" / "run.json").write_text(json.dumps({"config": config}))
    return root


def summary(**changes: Any) -> RunSummary:
    facts: dict[str, Any] = {
        "run_id": "a", "path": "/runs/a", "state": "running", "started_s": 0.0, "updated_s": 100.0,
    }  # fmt: skip
    return RunSummary(**(facts | changes))


# --- deleting -------------------------------------------------------------------------------------


def test_a_run_is_deleted_with_all_that_it_wrote_and_the_others_stay(runs: Path) -> None:
    before = contents(runs / "other").own_bytes
    assert remove_run(runs / "other", runs).own_bytes == before > 5000
    assert not (runs / "other").exists() and (runs / "ours" / "events.ndjson").exists()


def test_the_configuration_that_the_wizard_wrote_goes_and_one_of_the_user_stays(
    runs: Path,
) -> None:
    launch = prepare(
        Answers(settings={"train.steps": 3}, data_source="path", data_path="data.txt"), runs
    )
    (launch.run_dir / "run.json").write_text("{}")
    assert contents(launch.run_dir).kept_text == ""
    remove_run(launch.run_dir, runs)
    assert not launch.run_dir.exists()
    (runs / "other" / "config.yaml").write_text(launch.config_text)
    assert contents(runs / "other").kept_text == "config.yaml stays: not of the run"


def test_a_run_that_is_in_use_is_never_deleted(runs: Path) -> None:
    with RunDir(runs / "ours").lock(), pytest.raises(BadInput, match="is running"):
        remove_run(runs / "ours", runs)
    assert (runs / "ours" / "events.ndjson").exists()


def test_a_trainer_that_starts_meanwhile_wins(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fluxtrain.events.run_folder.removal.check_removable", lambda run_dir, root: None
    )
    with RunDir(runs / "ours").lock(), pytest.raises(BadInput, match="in use by process"):
        remove_run(runs / "ours", runs)
    assert (runs / "ours" / "events.ndjson").exists()


def test_what_is_not_in_the_runs_folder_is_never_deleted(runs: Path, made: ModuleType) -> None:
    made.write(runs.parent / "elsewhere" / "events.ndjson", made.training(3))
    nested = runs / "ours" / "nested"
    made.write(nested / "events.ndjson", made.training(3))
    for path in (runs.parent / "elsewhere", nested, runs, runs / "..", runs / "other" / ".."):
        with pytest.raises(BadInput):
            remove_run(path, runs)
    assert (runs.parent / "elsewhere").is_dir() and nested.is_dir()


def test_a_folder_without_a_run_is_never_deleted(runs: Path) -> None:
    (runs / "photos").mkdir()
    (runs / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(BadInput, match="holds no run"):
        remove_run(runs / "photos", runs)
    with pytest.raises(BadInput, match="not there"):
        remove_run(runs / "gone", runs)


# --- rows -----------------------------------------------------------------------------------------


def test_the_time_left_counts_down_from_the_newest_step() -> None:
    run = summary(eta_s=100.0, stepped_s=1000.0, step_s=50.0)
    assert left_text(run, 1030.0) == "1m 10s"
    assert left_text(run, 1200.0) == "0 s"
    run = summary(eta_s=100.0, stepped_s=1000.0, step_s=50.0, step=6, total_steps=8)
    assert left_text(run, 1030.0) == "1m 10s"
    assert left_text(run, 1200.0) == "50 s", "the last step is still to come"


def test_a_run_whose_next_step_is_overdue_has_no_time_left() -> None:
    assert left_text(summary(eta_s=9000.0, stepped_s=1000.0, step_s=1.0), 1020.0) != "-"
    assert left_text(summary(eta_s=9000.0, stepped_s=1000.0, step_s=1.0), 1040.0) == "-"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_rows_and_their_columns_line_up(width: int) -> None:
    run = summary(step=7, total_steps=200, loss=3.14159, eta_s=49.0, stepped_s=100.0, model="demo")
    row, names = run_row(run, None, 101.0, width), columns(width)
    assert width_of(row) == width_of(names) == width
    text, head = ("".join(part for part, _ in spans) for spans in (row, names))
    assert text.index("7/200") + 5 == head.index("step") + 4
    if width >= 80:
        assert text.index("3.1416") + 6 == head.index("loss") + 4
        assert text.index("49 s") + 4 == head.index("left") + 4


def test_the_list_knows_the_newest_steps_estimate(runs: Path, made: ModuleType) -> None:
    [ours] = [run for run in list_runs(runs) if run.run_id == "ours"]
    assert ours.eta_s == pytest.approx(made.step(80).eta_s)
    newest = [event for event in made.training(80) if type(event).__name__ == "StepFinished"][-1]
    assert ours.stepped_s == newest.wall_s


@pytest.mark.parametrize(
    ("state", "said"),
    [("running", "attaches"), ("finished", "e makes"), ("dead", ""), ("stopped", ""),
     ("failed", ""), ("refused", "")],
)  # fmt: skip
def test_only_a_run_that_is_not_over_is_gone_on_with(state: str, said: str) -> None:
    reason = cannot_resume(summary(state=state), View())
    assert said in reason and bool(reason) == bool(said)


def test_a_refused_run_is_listed_as_such_with_the_reason() -> None:
    run = summary(state="refused", message="nothing.txt does not exist: check data.path")
    row = "".join(text for text, _ in run_row(run, None, 0.0, 200))
    detail = "".join(text for line in run_detail(run, 120) for text, _ in line)
    assert " refused " in row and run.message in row and run.message in detail


# --- in the app -----------------------------------------------------------------------------------


async def listed(pilot: Any, app: Any, app_pilot: Any, name: str) -> None:
    """The list is on screen and the cursor on the run `name`."""
    await app_pilot.until(
        pilot, lambda: isinstance(app.screen, RunsScreen) and len(app.screen.runs) == 2
    )
    await app_pilot.drawn(pilot)
    names = [run.run_id for run in app.screen.runs]
    await pilot.press("g", *["j"] * names.index(name))
    assert app.screen.selected.run_id == name


async def test_a_run_is_deleted_only_after_a_yes(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "other")
        for answer in ("n", "escape", "enter"):
            await pilot.press("D")
            await app_pilot.until(pilot, lambda: "Delete other?" in app_pilot.text_of(app))
            text = app_pilot.text_of(app)
            assert "KiB" in text and "200 steps" in text
            await pilot.press(answer)
            await app_pilot.until(pilot, lambda: isinstance(app.screen, RunsScreen))
        assert (runs / "other").exists()
        await pilot.press("D")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, QuestionDialog))
        await pilot.press("y")
        await app_pilot.until(pilot, lambda: not (runs / "other").exists())
        await app_pilot.until(pilot, lambda: len(app.screen.runs) == 1)


async def test_the_run_on_screen_and_a_live_one_are_not_deleted(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    with RunDir(runs / "other").lock():
        time.sleep(0.01)
        (runs / "other" / "events.ndjson").write_bytes((runs / "ours/events.ndjson").read_bytes())
        async with app.run_test(size=SIZE) as pilot:
            await listed(pilot, app, app_pilot, "ours")
            await pilot.press("D")
            await app_pilot.until(pilot, lambda: "run on screen" in str(app_pilot.notes(app)))
            await listed(pilot, app, app_pilot, "other")
            await pilot.press("D")
            await app_pilot.until(pilot, lambda: "is running" in str(app_pilot.notes(app)))
    assert (runs / "other").exists() and (runs / "ours").exists()


async def test_a_clone_opens_the_wizard_with_the_runs_settings(
    runs: Path, made: ModuleType, app_pilot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluxtui.wizard.screen import WizardScreen

    async def no_engine(*command: str, **options: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("asyncio.create_subprocess_exec", no_engine)
    monkeypatch.setenv("XDG_STATE_HOME", str(runs.parent / "state"))
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "other")
        await pilot.press("e")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, WizardScreen))
        assert app.screen.answers.settings.get("train.steps") == 77
        app.screen.dismiss(None)
        await app_pilot.until(pilot, lambda: isinstance(app.screen, RunsScreen))
        assert app.is_running, "leaving the wizard leads back to the list"


async def test_runs_read_while_the_screen_is_taken_down_are_no_error(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "ours")
        screen = app.screen
        await screen.query("#body").remove()  # widgets leave before their screen does
        screen.look_again()
        await app.workers.wait_for_complete([it for it in app.workers if it.group == "runs"])
        await pilot.pause()
        assert app.is_running


async def test_a_run_without_its_settings_cannot_be_cloned(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "ours")
        await pilot.press("e")
        await app_pilot.until(pilot, lambda: "no readable run.json" in str(app_pilot.notes(app)))


async def test_compare_draws_the_selected_run_on_the_loss_screen(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "ours")
        await pilot.press("v")
        assert "choose another one" in str(app_pilot.notes(app))
        await listed(pilot, app, app_pilot, "other")
        await pilot.press("v")
        await app_pilot.until(pilot, lambda: "against other" in app_pilot.text_of(app))


async def test_a_click_selects_a_run_and_the_second_attaches(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "ours")
        at = [run.run_id for run in app.screen.runs].index("other")
        await pilot.click("#body", offset=(10, at))
        assert app.screen.selected.run_id == "other" and app.run_dir == runs / "ours"
        await pilot.double_click("#body", offset=(10, at))
        await app_pilot.until(pilot, lambda: app.run_dir == runs / "other")


async def test_resume_starts_the_trainer_on_the_runs_own_folder(
    runs: Path, made: ModuleType, app_pilot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluxtrain.events.run_folder.launch import start_trainer

    begun: list[Any] = []
    stand_in = ("/bin/sh", "-c", 'echo "$@" > "$3/begun"; sleep 600', "sh")

    def start(arguments: Any, run_dir: Any) -> Any:
        begun.append(start_trainer(arguments, run_dir, stand_in))
        return begun[0]

    monkeypatch.setattr("fluxtrain.events.run_folder.launch.start_trainer", start)
    made.write(runs / "other" / "events.ndjson", made.failed())
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "ours")
        await listed(pilot, app, app_pilot, "other")
        await pilot.press("r")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, QuestionDialog))
        await pilot.press("y")
        await app_pilot.until(pilot, lambda: app.run_dir == runs / "other")
    assert begun[0].exit_code() is None, "it outlives the app"
    assert os.getsid(begun[0].pid) == begun[0].pid
    begun[0].kill()
    begun[0].wait(60)


async def test_a_finished_run_is_not_resumed_and_read_only_changes_nothing(
    runs: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs")
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "other")
        await pilot.press("r")
        assert "has finished" in str(app_pilot.notes(app))
    app = app_pilot.app_on(runs / "ours", made, start_screen="runs", read_only=True)
    async with app.run_test(size=SIZE) as pilot:
        await listed(pilot, app, app_pilot, "other")
        await pilot.press("r", "e", "D", "n")
        await app_pilot.until(pilot, lambda: len(app_pilot.notes(app)) == 4)
        assert all("read-only" in note for note in app_pilot.notes(app))
        assert isinstance(app.screen, RunsScreen)


def test_a_link_is_not_followed_neither_as_the_run_nor_inside_it(
    runs: Path, made: ModuleType, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    made.write(precious / "events.ndjson", made.training(3))
    os.symlink(precious, runs / "link")
    with pytest.raises(BadInput, match="is a link"):
        check_removable(runs / "link", runs)
    before = contents(runs / "other").own_bytes
    os.symlink(precious, runs / "other" / "model")
    assert contents(runs / "other").own_bytes == before
    assert remove_run(runs / "other", runs).others == ("model",)
    assert (precious / "events.ndjson").exists()
    assert os.listdir(runs / "other") == ["model"]
