"""The base of all screens that show a run: header and footer, `draw`, and the run's keys."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.geometry import Size

from fluxtrain.events.typed import typed
from fluxtui.actions.action_screen import ActionScreen
from fluxtui.actions.key_map import screen_bindings
from fluxtui.app_base import AppBase
from fluxtui.panels.panel import key_of
from fluxtui.panels.trials import why_not
from fluxtui.screens.arrangement import too_small
from fluxtui.screens.chrome import header_line, notice_lines, status_line
from fluxtui.screens.run_actions import (
    USES,
    may_command,
    open_wizard,
    run_name,
    save,
    send,
)
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.footer import Footer
from fluxtui.widgets.lines import Ground, Lines
from fluxtui.widgets.spans import Line


class RunScreen(Ground, ActionScreen[None]):
    """A screen that draws the app's view. `NAME` is its name in the table of actions."""

    NAME: ClassVar[str] = ""
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings()
    DEFAULT_CSS = """
    RunScreen { layout: vertical; overflow: hidden; }
    RunScreen > .chrome { height: 1; width: 1fr; }
    RunScreen > #notice { height: 0; width: 1fr; }
    RunScreen > #body { height: 1fr; width: 1fr; }
    RunScreen.-tiny > * { display: none; }
    RunScreen.-tiny > #top, RunScreen.-tiny > #keys { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole = 1  # how many children the screen has while it is whole

    def compose(self) -> ComposeResult:
        yield Lines(id="top", classes="chrome")
        yield Lines(id="notice")
        yield from self.compose_body()
        yield Footer(self.NAME)

    def compose_body(self) -> ComposeResult:
        """Yield the widgets between header and footer; one of them has the id `body`."""
        yield Lines(id="body")

    @property
    def flux(self) -> AppBase:
        """Return the app with its own type."""
        return cast("AppBase", self.app)

    @property
    def place(self) -> str:
        return self.NAME

    @property
    def is_whole(self) -> bool:
        """Return whether all widgets exist: not before mounting, nor while the screen is being
        removed."""
        return self.is_mounted and len(self.children) >= self._whole

    def draw(self) -> None:
        """Draw the app's present view; cheap when little of it changed."""
        width, height = self.size
        if not self.is_whole or not width:
            return
        view, palette = self.flux.view, self.flux.palette
        tiny = too_small(width, height)
        self.set_class(tiny, "-tiny")
        top = status_line(view, width) if tiny else header_line(view, width)
        self.query_one("#top", Lines).show([top], palette)
        notice = self.query_one("#notice", Lines)
        sentences = [] if tiny else self.notices(view, width)
        if notice.styles.height is None or notice.styles.height.value != len(sentences):
            notice.styles.height = len(sentences)
            self.call_after_refresh(self.draw)  # the body has another size now
        notice.show(sentences, palette)
        paused = view.status.kind == "paused"
        commands = not why_not(view)
        self.query_one(Footer).show_keys(paused, self.flux.actions, palette, commands)
        if not tiny:
            self.draw_body(view, palette)

    def notices(self, view: View, width: int) -> list[Line]:
        """Return the lines below the header; nothing when all is well."""
        return notice_lines(view, width)

    def draw_body(self, view: View, palette: Palette) -> None:
        """Draw the area between header and footer."""

    def on_mount(self) -> None:
        self._whole = len(self.children)
        self.call_later(self._appear)

    def on_resize(self) -> None:
        self.call_next(self.draw)

    def on_screen_resume(self) -> None:
        self.call_next(self._appear)

    def _appear(self) -> None:
        """Draw and paint at once, because the user who pressed the key waits. In a screen that is
        not yet in front only the widgets are placed."""
        if not self.is_mounted:
            return
        if not self.size:
            self._refresh_layout(self.app.size)
        self.draw()
        if self._layout_required:
            self._layout_required = False
            self._refresh_layout(self.app.size)
            self.draw()
        if self.is_current:
            self._compositor.update_widgets(set(self._compositor.visible_widgets))
            self._compositor_refresh()

    def _refresh_layout(self, size: Size | None = None, scroll: bool = False) -> None:
        """Refresh as Textual does, but draw widgets in their new places before painting, so that
        none is painted empty."""
        with self.app.batch_update():
            super()._refresh_layout(size, scroll)
        self.call_next(self._repaint)  # the batch took the dirty regions without painting them

    def _repaint(self) -> None:
        if self.is_mounted and self.is_current:
            self._compositor.update_widgets(set(self._compositor.visible_widgets))
            self._compositor_refresh()

    # --- actions ------------------------------------------------------------------------------

    def action_show(self, name: str) -> None:
        """Bring another screen to the front."""
        self.flux.show_screen(name)

    def action_detach(self) -> None:
        """Leave the app; the trainer is another process and continues."""
        self.app.exit()

    def action_new_run(self) -> None:
        """Set up a new run in the wizard."""
        open_wizard(self.flux)

    def action_pause(self) -> None:
        """Pause the run, or go on when it is paused."""
        send(self.flux, "resume" if self.flux.view.status.kind == "paused" else "pause")

    def action_command(self, command: str) -> None:
        """Send a command to the trainer."""
        send(self.flux, command)

    def action_stop(self) -> None:
        """Ask, then stop the run after a checkpoint."""
        if may_command(self.flux, "stop"):
            from fluxtui.screens.dialogs import QuestionDialog

            leave = key_of(self.flux.view, "detach")
            told = (
                "It writes a checkpoint and ends after this step; the list of runs goes on from "
                f"there. To leave it running and close this window, press {leave} instead."
            )
            dialog = QuestionDialog("Stop this run?", told, "stop", "go on training")
            self.app.push_screen(dialog, self._stop_if)

    def _stop_if(self, stop: bool | None) -> None:
        if stop:
            send(self.flux, "stop")

    @property
    def run_in_use(self) -> Path | None:
        """Return the run whose model the keys use."""
        return self.flux.run_dir

    def action_use_model(self, use: str) -> None:
        """Chat with the model of a run, evaluate it, or export it."""
        if self.run_in_use is not None:
            USES[use](self.flux, self.run_in_use)

    def action_next_theme(self) -> None:
        """Draw in the next theme."""
        self.flux.next_theme()

    def action_copy(self) -> None:
        """Copy to the terminal's clipboard (OSC 52: it works over SSH too)."""
        text = self.text_to_copy()
        if text:
            self.app.copy_to_clipboard(text)
            self.app.notify(text, title="Copied")

    def text_to_copy(self) -> str:
        """Return the text to copy: the command that attaches to this run."""
        run_dir = self.flux.run_dir
        if run_dir is None:
            return ""
        return f"{typed('fluxtrain-tui')} --attach {shlex.quote(str(run_dir))}"

    @property
    def panel_in_focus(self) -> str | None:
        """Return the panel to save; None for the whole screen."""
        return None

    def action_table(self) -> None:
        """Save the numbers behind the panel in focus, else behind the screen, as CSV."""
        from fluxtui.csv_tables import csv_of, rows_held

        name, view = self.panel_in_focus or self.NAME, self.flux.view
        save(self.flux, f"{name}.csv", csv_of(name, view), rows_held(name, view))

    def action_export(self) -> None:
        """Save the whole screen as SVG."""
        app = self.flux
        save(app, f"{self.NAME}.svg", app.export_screenshot(title=run_name(app)))
