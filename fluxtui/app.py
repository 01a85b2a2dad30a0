"""The Textual application: its screens, and the actions of the registry put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.app import SystemCommand
from textual.binding import BindingType
from textual.screen import Screen

from fluxtui.actions import EVERYWHERE, bindings, screens_of_actions
from fluxtui.commands import palette_commands
from fluxtui.screens.run_screen import RunScreen
from fluxtui.verbs.advice import AdviceVerbs
from fluxtui.verbs.runs import RunsVerbs
from fluxtui.verbs.saving import SavingVerbs
from fluxtui.verbs.views import ViewVerbs

if TYPE_CHECKING:
    from fluxtui.wizard.frame import WizardFrame

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
AT_REST_S = 0.3  # between two screens that are made ready before they are asked for
FIRST_AT_REST_S = 1.2  # by then the first screen is whole


def make_screen(name: str) -> Screen[Any]:
    """The screen of this name; its module is read when it is first wanted, not at the start."""
    module, screen = SCREENS[name]
    made: Screen[Any] = getattr(import_module(module), screen)()
    return made


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

    SCREENS: ClassVar[dict[str, Callable[[], Screen[Any]]]] = {
        name: partial(make_screen, name) for name in SCREENS
    }

    def on_mount(self) -> None:
        self.set_keymap(dict(self.settings.keys))
        self.tell_what_was_left_out()
        if self._start_screen == "wizard":
            self.action_new_run()  # the dashboard comes with the run
        else:
            self.push_screen(self._start_screen)
        if self._source is not None:
            self._follow(self._source)
        self.call_after_refresh(self.watch_machine)
        self.set_timer(FIRST_AT_REST_S, self._make_ready)

    def _make_ready(self) -> None:
        """Make the screens that one key brings, one at a time, before that key is pressed.

        Making one takes as long as drawing the dashboard twice, and shows when it happens.
        """
        waiting = (one for one in MADE_READY if not self.is_ready(one))
        if not self._screen_stack:
            return  # the app is being left
        if isinstance(self.screen, RunScreen):  # not yet beside the wizard, which has no use for it
            name = next(waiting, None)
            if name is None:
                return
            self._get_screen(name)
        self.set_timer(AT_REST_S, self._make_ready)

    def is_ready(self, name: str) -> bool:
        """Whether a screen is made, seen or not."""
        made = self._installed_screens.get(name)
        return isinstance(made, Screen) and made.is_running

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the registry work on the screens they are for, and not behind a dialog."""
        if action in EVERYWHERE:
            return True
        on_screens = _SCREENS_OF.get(action)
        if on_screens is not None:
            screen = self.screen
            if hasattr(screen, "place"):  # the wizard, whose module is not read for this
                return action in ("help", "command_palette")
            if not isinstance(screen, RunScreen) or (on_screens and screen.NAME not in on_screens):
                return False
        return super().check_action(action, parameters)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: the registry, and each theme by its title."""
        name = screen.NAME if isinstance(screen, RunScreen) else ""
        run = partial(self.call_later, self.run_action)
        if hasattr(screen, "place"):
            wizard = cast("WizardFrame", screen)
            name, run = wizard.place, partial(self.call_later, wizard.do)
        return palette_commands(self.actions, name, self._themes, run, self.choose_theme)


_SCREENS_OF = screens_of_actions()
