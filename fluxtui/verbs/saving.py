"""Taking something away from the screen: the clipboard, a table, a picture."""

from __future__ import annotations

import shlex
from pathlib import Path

from fluxtui.screens.log import LogScreen
from fluxtui.screens.run_screen import RunScreen
from fluxtui.shell import Shell
from fluxtui.tables import csv_of


class SavingVerbs(Shell):
    """Actions that write what is seen somewhere else."""

    def action_copy(self) -> None:
        """To the terminal's clipboard (OSC 52: it works over SSH too)."""
        text = self.screen.newest if isinstance(self.screen, LogScreen) else ""
        if not text and self.run_dir is not None:
            text = f"fluxtrain-tui --attach {shlex.quote(str(self.run_dir))}"
        if text:
            self.copy_to_clipboard(text)
            self.notify(text, title="Copied", markup=False)

    def action_table(self) -> None:
        """Save the numbers behind the screen as CSV where the app was started."""
        name = self.screen.NAME if isinstance(self.screen, RunScreen) else ""
        run_id = self.view.state.hello.run_id if self.view.state.hello else "run"
        path = Path(f"{Path(run_id).name}-{name}.csv")
        try:
            path.write_text(csv_of(name, self.view.state), "utf-8")
        except OSError as error:
            self.notify(str(error), title="Not saved", severity="error")
        else:
            self.notify(str(path), title="Saved")

    def action_export(self) -> None:
        """Save the screen as SVG where the app was started."""
        try:
            path = self.save_screenshot(path=".")
        except OSError as error:
            self.notify(str(error), title="Not saved", severity="error")
        else:
            self.notify(path, title="Saved")
