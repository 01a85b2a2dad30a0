"""Screen 7: the runs of this machine; Enter attaches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from textual.app import ComposeResult

from fluxtrain.telemetry.rundir import RunSummary, list_runs
from fluxtui.panels.machine import machine_line
from fluxtui.panels.panel import key_of
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.link import Link
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.run_rows import columns, run_detail, run_row
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line

REFRESH_PERIOD_S = 3.0
NO_RUNS = "no runs here yet"
LOOKING = "looking ..."


class RunsScreen(RunScreen):
    """All runs below the runs folder, newest first."""

    NAME = "runs"
    AUTO_FOCUS = "#body"
    DEFAULT_CSS = "RunsScreen > #detail { height: 4; }"

    def __init__(self) -> None:
        super().__init__()
        self.runs: Sequence[RunSummary] = ()
        self._problem = LOOKING

    def compose_body(self) -> ComposeResult:
        yield Lines(id="columns", classes="chrome")
        yield ScrollingLines(id="body", cursor=True)
        yield Lines(id="detail")
        yield Lines(id="machine", classes="chrome")

    def on_mount(self) -> None:
        self._look()
        self.set_interval(REFRESH_PERIOD_S, self._look)

    def on_screen_resume(self) -> None:
        self._look()

    def _look(self) -> None:
        if self.is_current:
            self.run_worker(self._read, thread=True, exclusive=True, group="runs")

    def _read(self) -> None:
        runs: Sequence[RunSummary] = ()
        problem = ""
        try:
            runs = list_runs(self.flux.runs_folder)
        except OSError as error:
            problem = f"{self.flux.runs_folder} cannot be read: {error.strerror}"
        self.app.call_from_thread(self._show, runs, problem)

    def _show(self, runs: Sequence[RunSummary], problem: str = "") -> None:
        chosen = self.selected
        self.runs, self._problem = runs, problem
        if chosen is not None:  # the cursor stays on its run when others come or go
            paths = [run.path for run in runs]
            body = self.query_one("#body", ScrollingLines)
            body.cursor = paths.index(chosen.path) if chosen.path in paths else body.cursor
        self.draw()

    @property
    def selected(self) -> RunSummary | None:
        """The run under the cursor."""
        at = self.query_one("#body", ScrollingLines).cursor or 0
        return self.runs[at] if at < len(self.runs) else None

    def look_again(self) -> None:
        """Read the folder now: something in it has changed."""
        self._look()

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        width = body.size.width
        self.query_one("#columns", Lines).show([columns(width)], palette)
        attached = view.link.run_dir
        lines = [run_row(run, attached, view.wall_s or time.time(), width) for run in self.runs]
        why = self._problem or f"{NO_RUNS}: {key_of(view, 'new_run')} makes one"
        empty: list[Line] = [BLANK, ((f"  {why}", "dim"),)]
        body.show_all(lines or empty, palette)
        detail = [] if self.selected is None else run_detail(self.selected, width)
        self.query_one("#detail", Lines).show(detail, palette)
        here = replace(view, link=Link())  # this machine is of now also beside a replay
        line = machine_line(here, width - 3) if view.machine_sample is not None else ()
        self.query_one("#machine", Lines).show([(("   ", "text"), *line)], palette)

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self.draw()

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        if event.index < len(self.runs):
            self.flux.attach_to(Path(self.runs[event.index].path))
