"""Taking text, numbers and pictures out of the app: of the focused panel, else of the screen."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtui.actions.table import find
from fluxtui.csv_tables import csv_of, rows_held
from fluxtui.panels import PANELS
from fluxtui.screens.panel_screen import framed
from fluxtui.screens.run_actions import free_path
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from fluxtui.themes import PLAIN, load_themes
from fluxtui.widgets.picture import svg_of

SIZE = (120, 40)


@pytest.fixture
def view(made: ModuleType) -> View:
    state = FoldedRun().after_all(made.training(40))
    return View(state=state, wall_s=(state.last_wall_s or 0.0) + 0.5)


def rows(name: str, view: View) -> list[dict[str, str]]:
    return list(csv.DictReader(csv_of(name, view).splitlines()))


@pytest.mark.parametrize(
    ("name", "column"),
    [("dashboard", "phases_s.forward"), ("step", "step_s"), ("memory", "device_by.optimizer"),
     ("memory_history", "host_rss_bytes"), ("transfer", "h2d_bytes_per_s"),
     ("grad_norm", "grad_norm_mean"), ("learning_rate", "learning_rate_ema")],
)  # fmt: skip
def test_a_table_has_a_row_for_each_sample(view: View, name: str, column: str) -> None:
    found = rows(name, view)
    assert len(found) == 40 and all(float(row[column]) >= 0 for row in found)


def test_the_table_of_the_loss_is_of_the_whole_run_with_its_evaluations(
    made: ModuleType,
) -> None:
    state = FoldedRun().after_all(made.training(400, 400))
    found = rows("loss", View(state=state))
    assert len(found) == 400 > len(state.steps)
    assert [int(row["first_step"]) for row in found] == list(range(1, 401))
    evaluated = {int(row["last_step"]) for row in found if row["evaluation_loss"]}
    assert evaluated == {40 * i for i in range(1, 11)}


def test_a_table_without_the_oldest_steps_says_how_many_it_has(
    made: ModuleType, view: View
) -> None:
    long = View(state=FoldedRun().after_all(made.training(400, 400)))
    assert len(rows("dashboard", long)) == 256
    assert rows_held("dashboard", long).startswith("the newest 256 of 400 rows")
    assert rows_held("loss", long) == rows_held("bus", long) == rows_held("dashboard", view) == ""


def test_the_tables_of_blocks_moves_log_and_choices(view: View) -> None:
    blocks = rows("residency", view)
    assert [row["name"] for row in blocks] == [f"layers.{i}" for i in range(8)]
    assert "".join(row["optimizer"] for row in blocks) == "C" * 8
    assert {row["weights_bytes"] for row in blocks} == {"1050000"}
    assert rows("moves", view)[-1]["cause"] == "prefetch"
    assert [row["text"] for row in rows("log", view)] == [one.text for one in view.state.log]
    assert [row["name"] for row in rows("plan", view)] == ["train.batch_rows", "placement.offload"]


@pytest.mark.parametrize("name", [*PANELS, "dashboard", "plan", "runs"])
def test_before_the_first_event_every_table_is_empty(name: str) -> None:
    assert csv_of(name, View()) == "\n"


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_a_table_and_a_picture(view: View, panel: str) -> None:
    csv_of(panel, view)
    svg = svg_of(framed(PANELS[panel], view, 60, 12, "box"), PLAIN, 60, panel)
    assert svg.startswith("<svg") and PANELS[panel].title_in(view).split()[0] in svg


def test_a_picture_is_in_the_colours_of_its_theme(view: View) -> None:
    lines = framed(PANELS["loss"], view, 60, 12, "box")
    themes, _ = load_themes()
    pictures = {name: svg_of(lines, theme.palette, 60, "loss") for name, theme in themes.items()}
    assert len(set(pictures.values())) == len(themes)
    assert "#0d1117" in pictures["flux-dark"]


def test_what_was_saved_before_is_kept(tmp_path: Path) -> None:
    wanted = tmp_path / "run-loss.csv"
    assert free_path(wanted) == wanted
    wanted.write_text("")
    (tmp_path / "run-loss-2.csv").write_text("")
    assert free_path(wanted) == tmp_path / "run-loss-3.csv"


# --- in the app -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    made.write(tmp_path / "runs" / "demo" / "events.ndjson", made.training(80))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "demo"


async def test_keys_save_the_screen_and_then_the_panel_in_focus(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(run, made)
    folder = Path()
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("x", "X")
        await app_pilot.until(pilot, lambda: list(folder.glob("*-dashboard.svg")))
        await app_pilot.until(pilot, lambda: list(folder.glob("*-dashboard.csv")))
        await pilot.press("tab", "tab", "x", "X")
        await app_pilot.until(pilot, lambda: list(folder.glob("*-memory.csv")))
        assert list(folder.glob("*-memory.svg"))
    [picture] = folder.glob("*-memory.svg")
    assert "weights" in picture.read_text() and "Progress" not in picture.read_text()


async def test_a_folder_that_cannot_be_written_is_told(
    run: Path, made: ModuleType, app_pilot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fluxtui.screens.run_actions.Path.write_text", refuse)
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("x")
        await app_pilot.until(pilot, lambda: "No space left" in str(app_pilot.notes(app)))


async def test_copying_takes_the_newest_line_of_the_log_else_how_to_attach(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=SIZE) as pilot:
        await app_pilot.drawn(pilot)
        key = find("copy").keys
        await pilot.press(key)
        assert app.clipboard == f"fluxtrain-tui --attach {run}"
        await pilot.press("5")
        await app_pilot.until(pilot, lambda: app.screen_name == "log")
        await app_pilot.still(pilot)
        await pilot.press(key)
        assert app.clipboard == list(app.view.state.log)[-1].text
