"""The settings, which the arrow keys change, and the list of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from fluxtui.actions.key_map import own_bindings
from fluxtui.actions.table import Action
from fluxtui.screens.run_screen import RunScreen
from fluxtui.settings import CHOICES, Settings
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, fitted, width_of, wrapped

NAME_CELLS = 16
VALUE_CELLS = 18
KEYS_CELLS = 16
ID_CELLS = 22
OTHER_KEYS = 'To change keys: add a table [keys] to that file, such as stop = "ctrl+q"'


class SettingsScreen(RunScreen):
    """One line a setting; left and right change it and save it at once."""

    NAME = "settings"
    AUTO_FOCUS = "#body"
    DEFAULT_CSS = """
    SettingsScreen > #body { height: auto; }
    SettingsScreen > #about { height: 3; width: 1fr; }
    SettingsScreen > #keys-in-use { height: 1fr; width: 1fr; }
    SettingsScreen.-tiny > #keys-in-use { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = own_bindings(("setting_before", "setting_after"))

    def compose_body(self) -> ComposeResult:
        yield ScrollingLines(id="body", cursor=True)
        yield Lines(id="about")
        yield ScrollingLines(id="keys-in-use")

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        body.styles.height = len(CHOICES)
        width = body.size.width
        rows = [setting_row(self.flux.settings, name, width) for name in CHOICES]
        body.show_all(rows, palette)
        selected = list(CHOICES.values())[min(body.cursor or 0, len(CHOICES) - 1)]
        told = [(("  ", "text"), (part, "text")) for part in wrapped(selected.about, width - 4)]
        self.query_one("#about", Lines).show([BLANK, *told], palette)
        place = str(self.flux.settings_file or "nowhere: this app keeps no settings")
        keys = self.query_one("#keys-in-use", ScrollingLines)
        keys.show_all(key_lines(self.flux.actions, place, keys.size.width), palette)

    def action_turn(self, by: int) -> None:
        """Choose the next or the previous value of the setting under the cursor."""
        names = list(CHOICES)
        at = self.query_one("#body", ScrollingLines).cursor or 0
        self.flux.turn_setting(names[min(at, len(names) - 1)], by)

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self.draw()

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        self.action_turn(1)


def setting_row(settings: Settings, name: str, width: int) -> Line:
    """Name and value between arrows."""
    value = shown(getattr(settings, name))
    return fitted(
        (
            (f"  {name.replace('_', ' '):<{NAME_CELLS}}", "text"),
            (f"‹ {value} ›".ljust(VALUE_CELLS), "strong"),
        ),
        width,
    )


def shown(value: object) -> str:
    """Return a value in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def key_lines(actions: Sequence[Action], place: str, width: int) -> list[Line]:
    """List every action with its keys and the id by which its keys can be changed."""
    lines: list[Line] = [
        BLANK,
        *((("  ", "text"), (part, "dim")) for part in wrapped(f"Kept in {place}", width - 4)),
        *((("  ", "text"), (part, "dim")) for part in wrapped(OTHER_KEYS, width - 4)),
        BLANK,
        fitted(((f"  {'keys':<{KEYS_CELLS}}{'id':<{ID_CELLS}}what", "dim"),), width),
    ]
    for action in actions:
        head: Line = (
            (f"  {action.all_keys_text:<{KEYS_CELLS}}", "key"),
            (f"{action.id:<{ID_CELLS}}", "text"),
        )
        indent = width_of(head)
        about = wrapped(action.about, max(12, width - indent - 1))
        lines += [
            (*(head if i == 0 else ((" " * indent, "text"),)), (part, "dim"))
            for i, part in enumerate(about)
        ]
    return lines
