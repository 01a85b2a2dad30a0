"""Screens, panels, the log, themes and help."""

from __future__ import annotations

from fluxtui.screens.dialogs import HelpScreen
from fluxtui.screens.log import LogScreen
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.shell import Shell


class ViewVerbs(Shell):
    """Actions that bring something else in view."""

    def action_maximise(self) -> None:
        """The focused panel in full, or back."""
        if isinstance(self.screen, PanelScreen):
            self.screen.toggle_maximised()

    def action_filter(self) -> None:
        """Filter the log."""
        if isinstance(self.screen, LogScreen):
            self.screen.open_filter()

    def action_log_level(self) -> None:
        """Lines of the log from a higher level up, then all again."""
        if isinstance(self.screen, LogScreen):
            self.screen.next_level()

    def action_log_kind(self) -> None:
        """Lines of one kind after the other, then all again."""
        if isinstance(self.screen, LogScreen):
            self.screen.next_kind()

    def action_follow(self) -> None:
        """Follow the log's end, or not."""
        if isinstance(self.screen, LogScreen):
            self.screen.toggle_following()

    def action_next_theme(self) -> None:
        """The next theme in the order of names."""
        names = sorted(self._themes)
        if names:
            at = names.index(self.theme) if self.theme in names else -1
            self._choose_theme(names[(at + 1) % len(names)])
            self.notify(self._themes[self.theme].title, title="Theme", timeout=2)

    def _choose_theme(self, name: str) -> None:
        self._set_theme(name)
        self._keep(theme=name)

    def action_help(self) -> None:
        """Keys and panels."""
        self.push_screen(HelpScreen())
