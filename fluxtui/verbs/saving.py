"""Taking something away from the screen: the clipboard, a table, a picture."""

from __future__ import annotations

import shlex
from pathlib import Path

from fluxtrain.telemetry.typed import typed
from fluxtui.panels import PANELS
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.shell import Shell
from fluxtui.widgets.framed import framed


class SavingVerbs(Shell):
    """Actions that write what is seen somewhere else."""

    def action_copy(self) -> None:
        """To the terminal's clipboard (OSC 52: it works over SSH too)."""
        log = self.log_screen()
        text = log.newest if log is not None else ""
        if not text and self.run_dir is not None:
            text = f"{typed('fluxtrain-tui')} --attach {shlex.quote(str(self.run_dir))}"
        if text:
            self.copy_to_clipboard(text)
            self.notify(text, title="Copied")

    def action_table(self) -> None:
        """The numbers behind the panel in focus, else behind the screen, as CSV."""
        from fluxtui.tables import csv_of, rows_held

        name = self._panel_in_focus() or self._screen_name()
        self._save(f"{name}.csv", csv_of(name, self.view), rows_held(name, self.view))

    def action_export(self) -> None:
        """The panel in focus, else the whole screen, as SVG."""
        name = self._panel_in_focus()
        if name is None:
            self._save(f"{self._screen_name()}.svg", self.export_screenshot(title=self._run_name()))
            return
        from fluxtui.widgets.picture import svg_of

        size = self.screen.query_one(f"#{name}").size
        panel = PANELS[name]
        lines = framed(panel, self.view, size.width, size.height, "box")
        title = f"{self._run_name()} {panel.title}"
        self._save(f"{name}.svg", svg_of(lines, self.palette, size.width, title))

    def _panel_in_focus(self) -> str | None:
        return self.screen.panel_in_focus if isinstance(self.screen, PanelScreen) else None

    def _screen_name(self) -> str:
        return self.screen_name or "screen"

    def _run_name(self) -> str:
        hello = self.view.state.hello
        return Path(hello.run_id).name if hello else "run"

    def _save(self, name: str, text: str, note: str = "") -> None:
        """Write where the app was started, over nothing; tell the name and a note."""
        path_of = f"{self._run_name()}-{name}"
        try:
            path = free_path(Path(path_of))
            path.write_text(text, "utf-8")
        except OSError as error:
            told = f"{error.filename or path_of}: {error.strerror}"
            self.notify(told, title="Not saved", severity="error")
        else:
            self.notify(f"{path}: {note}" if note else str(path), title="Saved")


def free_path(wanted: Path) -> Path:
    """`wanted`, or the same with -2, -3, ... where that name is taken."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path
