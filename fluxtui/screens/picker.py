"""Asks which run to compare with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import Static

from fluxtrain.events.run_folder.run_dir import RunSummary, list_runs
from fluxtui.app_base import AppBase
from fluxtui.screens.dialogs import DIALOG_CSS
from fluxtui.screens.run_rows import run_row
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import Line

MOST_ROWS = 12


class RunPicker(ModalScreen["RunPicker.Picked | None"]):
    """Lists the runs of a folder except the one on screen; the first line ends a comparison."""

    DEFAULT_CSS = DIALOG_CSS.format(name="RunPicker", width=96)
    BINDINGS = [Binding("escape,q,v", "leave", "Leave", show=False)]
    AUTO_FOCUS = "#others"

    @dataclass(frozen=True)
    class Picked:
        """The chosen run; None for no other run."""

        run_dir: Path | None

    def __init__(self, folder: Path, present: Path | None) -> None:
        super().__init__()
        self._folder, self._present = folder, present
        self._runs: Sequence[RunSummary] = ()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("[b]Compare with which run?[/b]\n")
            yield ScrollingLines(id="others", cursor=True)
            yield Static("\n[b]enter[/b] compare      [b]esc[/b] leave")

    def on_mount(self) -> None:
        self.query_one("#others").styles.height = 2
        self.run_worker(self._read, thread=True, exclusive=True)

    def _read(self) -> None:
        runs: list[RunSummary] = []
        with suppress(OSError):
            runs = [run for run in list_runs(self._folder) if Path(run.path) != self._present]
        self.app.call_from_thread(self._show, runs)

    def _show(self, runs: Sequence[RunSummary]) -> None:
        self._runs = runs
        with suppress(NoMatches):  # left meanwhile
            self.query_one("#others").styles.height = min(MOST_ROWS, len(runs) + 1)
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Draw the list; nothing while the screen is incomplete."""
        if not self.query("#others"):
            return
        others = self.query_one("#others", ScrollingLines)
        alone: Line = (("   no other run", "dim" if self._runs else "text"),)
        now_s, width = time.time(), others.size.width
        lines = [alone, *(run_row(run, None, now_s, width) for run in self._runs)]
        others.show_all(lines, cast("AppBase", self.app).palette.over("surface"))

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        chosen = Path(self._runs[event.index - 1].path) if event.index else None
        self.dismiss(self.Picked(chosen))

    def action_leave(self) -> None:
        """Close without a choice."""
        self.dismiss(None)
