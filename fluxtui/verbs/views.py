"""Screens, panels, the log, themes and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.settings import CHOICES, Choices
from fluxtui.shell import Shell
from fluxtui.terminal import TerminalDriver


class ViewVerbs(Shell):
    """Actions that bring something else in view."""

    def action_maximise(self) -> None:
        """The focused panel in full, or back."""
        if isinstance(self.screen, PanelScreen):
            self.screen.toggle_maximised()

    def action_filter(self) -> None:
        """Filter the log."""
        if (log := self.log_screen()) is not None:
            log.open_filter()

    def action_log_level(self) -> None:
        """Lines of the log from a higher level up, then all again."""
        if (log := self.log_screen()) is not None:
            log.next_level()

    def action_log_kind(self) -> None:
        """Lines of one kind after the other, then all again."""
        if (log := self.log_screen()) is not None:
            log.next_kind()

    def action_follow(self) -> None:
        """Follow the log's end, or not."""
        if (log := self.log_screen()) is not None:
            log.toggle_following()

    def action_next_theme(self) -> None:
        """The next theme in the order of names."""
        self.turn_setting("theme", 1)
        said = self._themes[self._theme_name].title if self._themes else ""
        if self.low_bandwidth:
            said = f"{said}, once low bandwidth is off"
        if self.no_color:
            said = f"{said}, once NO_COLOR is not set"
        self.notify(said, title="Theme", timeout=2)

    def choose_theme(self, name: str) -> None:
        """Draw in this theme from now on."""
        self._theme_name = name
        self._keep(theme=name)
        self.use_colours()

    def setting_choices(self) -> Mapping[str, Choices]:
        """The settings that can be changed in the app."""
        return CHOICES

    def turn_setting(self, name: str, by: int) -> None:
        """Give a setting its next or its last value, at once and for the next start."""
        value = getattr(self.settings, name)
        if name == "theme":
            value = self._theme_name
        new = CHOICES[name].turned(value, by, sorted(self._themes))
        if name == "theme":
            self.choose_theme(new)
            return
        self._keep(**{name: new})
        if name in ("smooth", "log_scale", "by_tokens"):
            self.view = replace(self.view, chart=replace(self.view.chart, **{name: new}))
        if name == "low_bandwidth":
            self._asked_for_low_bandwidth = False  # what is chosen now outweighs the command line
        self.use_colours()

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
        """Ctrl-C, which copies in a field and ends nothing: what leaves, and what stops a run."""
        keys = {action.id: action.key_text for action in self.actions}
        words = f"{keys['detach']} leaves, the training goes on; {keys['stop']} stops it"
        if hasattr(self.screen, "place"):  # the wizard: nothing trains yet
            words = f"{keys['wizard_back']} goes a step back, before the first one out"
        self.notify(words, title="Ctrl-C ends nothing here")

    def action_help(self) -> None:
        """The keys and the panels of the screen in front."""
        from fluxtui.screens.dialogs import HelpScreen

        screen = self.screen
        panels = screen.SHOWN if isinstance(screen, PanelScreen) else ()
        self.push_screen(HelpScreen(self.screen_name or getattr(screen, "place", ""), panels))
