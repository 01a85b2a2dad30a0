"""Screen 7: the runs of this machine; Enter attaches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from textual.app import ComposeResult

from fluxtrain.telemetry.rundir import RunSummary, list_runs
from fluxtrain.units import UNKNOWN, duration_text
from fluxtui.panels.panel import number_text
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, fitted

REFRESH_PERIOD_S = 3.0
STATE_ROLES = {
    "running": "good", "finished": "text", "failed": "bad", "interrupted": "warn", "dead": "bad",
    "new": "dim",
}  # fmt: skip


class RunsScreen(RunScreen):
    """All runs below the runs folder, newest first."""

    NAME = "runs"
    AUTO_FOCUS = "#body"

    def __init__(self) -> None:
        super().__init__()
        self.runs: Sequence[RunSummary] = ()

    def compose_body(self) -> ComposeResult:
        yield Lines(id="columns", classes="chrome")
        yield ScrollingLines(id="body", cursor=True)

    def on_mount(self) -> None:
        self._look()
        self.set_interval(REFRESH_PERIOD_S, self._look)

    def on_screen_resume(self) -> None:
        self._look()

    def _look(self) -> None:
        if self.is_current:
            self.run_worker(self._read, thread=True, exclusive=True, group="runs")

    def _read(self) -> None:
        runs = list_runs(self.flux.runs_folder)
        self.app.call_from_thread(self._show, runs)

    def _show(self, runs: Sequence[RunSummary]) -> None:
        self.runs = runs
        self.draw()

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        width = body.size.width
        self.query_one("#columns", Lines).show([columns(width)], palette)
        attached = view.link.run_dir
        lines = [run_row(run, attached, view.wall_s or time.time(), width) for run in self.runs]
        empty: list[Line] = [BLANK, (("  no runs here yet: n makes one", "dim"),)]
        body.show_all(lines or empty, palette)

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        if event.index < len(self.runs):
            self.flux.attach_to(Path(self.runs[event.index].path))


def columns(width: int) -> Line:
    """The names of the columns."""
    text = (
        f"   {'state':<12}{'run':<{_name_cells(width)}}{'step':>13}  {'loss':>8}  {'age':>9}  model"
    )
    return fitted(((text, "dim"),), width)


def run_row(run: RunSummary, attached: Path | None, now_s: float, width: int) -> Line:
    """One run; the one on screen is marked."""
    here = attached is not None and Path(run.path) == attached
    cells = _name_cells(width)
    step = UNKNOWN if run.step is None else f"{run.step}/{run.total_steps or UNKNOWN}"
    note = run.message or run.model or ""
    return fitted(
        (
            (" ▸ " if here else "   ", "accent"),
            (f"{run.state:<12}", STATE_ROLES[run.state]),
            (f"{run.run_id[: cells - 1]:<{cells}}", "strong" if here else "text"),
            (f"{step:>13}", "text"),
            (f"  {number_text(run.loss):>8}", "text"),
            (f"  {duration_text(max(0.0, now_s - run.updated_s)):>9}  ", "dim"),
            (note, "bad" if run.message else "dim"),
        ),
        width,
    )


def _name_cells(width: int) -> int:
    return max(18, min(40, width - 62))
