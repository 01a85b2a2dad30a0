"""Settings that last, keys that a user changed, and taking text and numbers out of the app."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from fluxtui.actions import ACTIONS, find
from fluxtui.app import FluxApp
from fluxtui.screens.run_screen import RunScreen
from fluxtui.settings import Settings, load_settings, save_settings, settings_path
from fluxtui.sources.journal import JournalSource
from fluxtui.state.run import RunState
from fluxtui.tables import csv_of
from fluxtui.widgets.lines import Lines


class Alive(JournalSource):
    """A run whose process is taken to be alive."""

    def _look_after_the_process(self) -> None:
        self._process = "alive"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})


def app_on(made: ModuleType, folder: Path, file: Path | None, **options: Any) -> FluxApp:
    run = folder / "demo"
    events = made.training(40)
    made.write(run / "events.ndjson", events)
    last_s = events[-1].wall_s
    return FluxApp(
        Alive(run),
        settings_file=file,
        sample_machine=False,
        runs_folder=folder,
        wall_clock=lambda: last_s + 0.5,
        **options,
    )


async def drawn(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, FluxApp)
    await until(pilot, lambda: app.view.state.step is not None)
    await pilot.pause(0.1)


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 8
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await pilot.pause(0.05)


# --- the file -------------------------------------------------------------------------------------


def test_settings_lie_where_the_desktop_standard_says() -> None:
    assert settings_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/fluxtrain/app.toml")
    assert settings_path({"HOME": "/h"}) == Path("/h/.config/fluxtrain/app.toml")


def test_what_is_saved_is_loaded(file: Path) -> None:
    wanted = Settings(theme="sixteen", smooth=False, log_scale=True, low_bandwidth=True)
    assert load_settings(file) == (Settings(), [])
    assert save_settings(wanted, file)
    assert load_settings(file) == (wanted, [])


def test_saving_leaves_comments_and_keys_as_the_user_wrote_them(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text('# mine\ntheme = "flux-dark"\n\n[keys]\n# as in vim\nstop = "ctrl+q"\n')
    assert save_settings(Settings(theme="flux-light"), file)
    text = file.read_text()
    assert text.startswith('# mine\ntheme = "flux-light"\n')
    assert text.endswith('\n[keys]\n# as in vim\nstop = "ctrl+q"\n')
    settings, problems = load_settings(file)
    assert settings.theme == "flux-light" and settings.keys == {"stop": "ctrl+q"}
    assert problems == []


def test_a_file_that_is_no_toml_is_told_and_never_overwritten(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("theme = \n")
    settings, problems = load_settings(file)
    assert settings == Settings() and "cannot be read" in problems[0]
    assert not save_settings(Settings(theme="sixteen"), file)
    assert file.read_text() == "theme = \n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("theme = 3", "theme = 3"),
        ("smooth = 1", "something like True"),
        ('colour = "red"', "no such setting"),
        ("keys = 1", "[keys]"),
        ('[keys]\nfly = "x"', "no such action"),
        ("[keys]\nstop = 3", "keys look like"),
        ('[keys]\nstop = "a b"', "keys look like"),
        ('[keys]\nstop = ""', "keys look like"),
        ('[keys]\nstop = "p"', "pause has this key"),
        ('[keys]\nstop = "?"', "help has this key"),
    ],
)
def test_a_bad_entry_is_told_and_the_others_are_kept(file: Path, text: str, said: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(f"log_scale = true\n{text}\n")
    settings, problems = load_settings(file)
    assert len(problems) == 1 and said in problems[0]
    assert settings == Settings(log_scale=True)


def test_no_two_actions_of_one_screen_share_a_key() -> None:
    for screen in ("dashboard", "memory", "transfer", "loss", "log", "plan", "runs"):
        keys = [key for one in ACTIONS if one.works_on(screen) for key in one.keys.split(",")]
        assert len(keys) == len(set(keys)), screen


# --- in the app -----------------------------------------------------------------------------------


async def test_choices_last_until_the_next_start(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    app = app_on(made, tmp_path, file)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert not file.exists()
        await pilot.press("y", "e", "t")
        chosen = app.theme
    again = app_on(made, tmp_path, file)
    async with again.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert again.theme == chosen != "flux-dark"
        assert again.view.chart.log_scale and not again.view.chart.smooth


async def test_a_users_key_acts_and_is_shown_and_the_old_one_is_free(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text('[keys]\nshow_log = "L"\nfly = "x"\n')
    app = app_on(made, tmp_path, file)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert any("keys.fly" in note.message for note in app._notifications)
        assert "L Log" in app.screen.query_one("#keys", Lines).text
        await pilot.press("5")
        assert isinstance(app.screen, RunScreen) and app.screen.NAME == "dashboard"
        await pilot.press("L")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.NAME == "log")


async def test_copying_takes_the_newest_line_of_the_log_else_how_to_attach(
    made: ModuleType, tmp_path: Path
) -> None:
    app = app_on(made, tmp_path, None)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        key = find("copy").keys
        await pilot.press(key)
        assert app.clipboard == f"fluxtrain-tui --attach {tmp_path / 'demo'}"
        await pilot.press("5")
        await pilot.pause(0.2)
        await pilot.press(key)
        assert app.clipboard == list(app.view.state.log)[-1].text


@pytest.mark.parametrize(
    ("screen", "column"),
    [("loss", "phases_s.forward"), ("memory", "device_by.optimizer"),
     ("transfer", "h2d_bytes_per_s"), ("log", "text")],
)  # fmt: skip
def test_a_table_has_a_row_for_each_sample(made: ModuleType, screen: str, column: str) -> None:
    state = RunState().after_all(made.training(40))
    rows = list(csv.DictReader(csv_of(screen, state).splitlines()))
    if screen == "log":
        assert [row[column] for row in rows] == [entry.text for entry in state.log]
    else:
        assert len(rows) == 40 and all(float(row[column]) >= 0 for row in rows)


def test_the_table_of_steps_holds_what_was_measured(made: ModuleType) -> None:
    state = RunState().after_all(made.training(40))
    rows = list(csv.DictReader(csv_of("loss", state).splitlines()))
    assert [float(row["loss"]) for row in rows] == [step.loss for step in state.steps]
    assert csv_of("loss", RunState()) == "\n"


async def test_a_key_saves_the_table_where_the_app_was_started(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_on(made, tmp_path, None)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        await pilot.press("X")
        await until(pilot, lambda: list(tmp_path.glob("*-dashboard.csv")) != [])
