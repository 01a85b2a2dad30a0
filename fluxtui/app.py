"""The Textual application: its screens, and the actions of the registry put together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import BindingType
from textual.screen import Screen

from fluxtui.actions import bindings, screens_of_actions
from fluxtui.commands import palette_commands
from fluxtui.screens.charts import Dashboard, LossScreen, MemoryScreen, TransferScreen
from fluxtui.screens.log import LogScreen
from fluxtui.screens.plan import PlanScreen
from fluxtui.screens.run_screen import RunScreen
from fluxtui.screens.runs import RunsScreen
from fluxtui.screens.settings import SettingsScreen
from fluxtui.verbs.advice import AdviceVerbs
from fluxtui.verbs.runs import RunsVerbs
from fluxtui.verbs.saving import SavingVerbs
from fluxtui.verbs.views import ViewVerbs

SCREENS: dict[str, type[RunScreen]] = {
    screen.NAME: screen
    for screen in (
        Dashboard,
        MemoryScreen,
        TransferScreen,
        LossScreen,
        LogScreen,
        PlanScreen,
        RunsScreen,
        SettingsScreen,
    )
}


class FluxApp(AdviceVerbs, RunsVerbs, ViewVerbs, SavingVerbs):
    """Draws a run. Leaving it never touches the training."""

    TITLE = "FluxTrain"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]
    CSS = """
    RunScreen { background: $background; color: $foreground; }
    Toast { max-width: 70; }
    * {
        scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $panel;
        scrollbar-color-hover: $primary; scrollbar-background-hover: $surface;
    }
    """

    def on_mount(self) -> None:
        self._load_themes()
        self.set_keymap(dict(self.settings.keys))
        for problem in self._skipped:
            self.notify(problem, title="Setting left out", severity="warning")
        for name, screen in SCREENS.items():
            self.install_screen(screen(), name)
        first = "dashboard" if self._start_screen == "wizard" else self._start_screen
        self.push_screen(first)
        if self._start_screen == "wizard":
            self.action_new_run()
        if self._source is not None:
            self._follow(self._source)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the registry work on the screens they are for, and not behind a dialog."""
        on_screens = _SCREENS_OF.get(action)
        if on_screens is not None:
            screen = self.screen
            if not isinstance(screen, RunScreen) or (on_screens and screen.NAME not in on_screens):
                return False
        return super().check_action(action, parameters)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: the registry, and each theme by its title."""
        name = screen.NAME if isinstance(screen, RunScreen) else ""
        run = partial(self.call_later, self.run_action)
        return palette_commands(self.actions, name, self._themes, run, self.choose_theme)


_SCREENS_OF = screens_of_actions()
