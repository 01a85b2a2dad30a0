"""The Textual application: its screens, and the actions that work on all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.screen import Screen

from fluxtui.actions.key_map import app_bindings
from fluxtui.actions.table import PAGES
from fluxtui.app_base import AppBase
from fluxtui.screens.palette import ActionProvider
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.screens.run_actions import open_wizard
from fluxtui.screens.run_screen import RunScreen
from fluxtui.terminal import TerminalDriver

SCREENS: dict[str, tuple[str, str]] = {
    "dashboard": ("fluxtui.screens.charts", "Dashboard"),
    "memory": ("fluxtui.screens.charts", "MemoryScreen"),
    "transfer": ("fluxtui.screens.charts", "TransferScreen"),
    "loss": ("fluxtui.screens.charts", "LossScreen"),
    "log": ("fluxtui.screens.log", "LogScreen"),
    "plan": ("fluxtui.screens.plan", "PlanScreen"),
    "runs": ("fluxtui.screens.runs", "RunsScreen"),
    "settings": ("fluxtui.screens.settings", "SettingsScreen"),
}


MADE_READY = ("loss", "log", "plan", "memory", "transfer", "runs")
QUIT_KEY = "ctrl+q"
AT_REST_S = 0.3  # between two screens that are made ready before they are asked for
FIRST_AT_REST_S = 1.2  # by then the first screen is whole


def make_screen(name: str) -> Screen[Any]:
    """Make the screen of this name; its module is imported on first use, not at the start."""
    module, screen = SCREENS[name]
    made: Screen[Any] = getattr(import_module(module), screen)()
    return made


class FluxApp(AppBase):
    """Draws a run, with help, palette and suspending; leaving it never touches the training."""

    TITLE = "FluxTrain"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {ActionProvider}
    BINDINGS: ClassVar[list[BindingType]] = app_bindings()
    CSS = """
    RunScreen { background: $background; color: $foreground; }
    Toast { max-width: 70; }
    * {
        scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $panel;
        scrollbar-color-hover: $primary; scrollbar-background-hover: $surface;
    }
    """

    SCREENS: ClassVar[dict[str, Callable[[], Screen[Any]]]] = {
        name: partial(make_screen, name) for name in SCREENS
    }

    def on_mount(self) -> None:
        self.set_keymap(dict(self.settings.keys))
        self.tell_what_was_left_out()
        if self._start_screen == "wizard":
            open_wizard(self)  # the dashboard comes with the run
        else:
            self.push_screen(self._start_screen)
        self.followed.begin()
        self.call_after_refresh(self.watch_machine)
        self.set_timer(FIRST_AT_REST_S, self._make_ready)

    def _make_ready(self) -> None:
        """Make the screens that have a key, one at a time, before that key is pressed.

        Making a screen takes as long as drawing the dashboard twice, a visible delay.
        """
        waiting = (one for one in MADE_READY if not self.is_ready(one))
        if not self._screen_stack:
            return  # the app is closing
        if isinstance(self.screen, RunScreen):  # the wizard does not need it
            name = next(waiting, None)
            if name is None:
                return
            self._get_screen(name)
        self.set_timer(AT_REST_S, self._make_ready)

    def is_ready(self, name: str) -> bool:
        """Return whether a screen is made, shown or not."""
        made = self._installed_screens.get(name)
        return isinstance(made, Screen) and made.is_running

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave ctrl+q, with which Textual quits, to an action that the user gave this key."""
        own_keys = (key for keys in self.settings.keys.values() for key in keys.split(","))
        if action == "quit" and QUIT_KEY in own_keys:
            return False
        return super().check_action(action, parameters)

    def action_suspend(self) -> None:
        """Leave the terminal to the shell until it continues the app."""
        driver = self._driver
        if not isinstance(driver, TerminalDriver) or not driver.to_the_shell():
            key = next(action.key_text for action in self.actions if action.id == "detach")
            self.notify(
                f"no shell waits for this app: {key} leaves it", title="Cannot stop here",
                severity="warning",
            )  # fmt: skip

    def action_help_quit(self) -> None:
        """Say on Ctrl-C, which only copies in a field, how to leave and how to stop a run."""
        keys = {action.id: action.key_text for action in self.actions}
        words = f"{keys['detach']} leaves, the training goes on; {keys['stop']} stops it"
        if self.place in PAGES:  # the wizard: nothing trains yet
            words = f"{keys['wizard_back']} goes one step back; on the first step it leaves"
        elif self.view.status.ended:
            words = f"{keys['detach']} leaves; the run has ended"
        self.notify(words, title="Ctrl-C does not close the app")

    def action_help(self) -> None:
        """Show the keys and the panels of the screen in front."""
        from fluxtui.screens.dialogs import HelpScreen

        panels = self.screen.SHOWN if isinstance(self.screen, PanelScreen) else ()
        self.push_screen(HelpScreen(self.place, panels))
