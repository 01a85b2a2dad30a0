"""Help, and the question before a run is stopped."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from fluxtui.actions import ACTIONS, GROUPS
from fluxtui.panels import PANELS

DIALOG_CSS = """
{name} {{ align: center middle; }}
{name} > .dialog {{
    width: {width}; max-width: 96%; height: auto; max-height: 94%;
    background: $surface; border: round $primary; padding: 1 2;
}}
"""


class StopDialog(ModalScreen[bool]):
    """Stop the run? `y` stops, anything else does not."""

    DEFAULT_CSS = DIALOG_CSS.format(name="StopDialog", width=62)
    BINDINGS = [
        Binding("y", "answer(True)", "Stop", show=False),
        Binding("n,escape,enter,q,Q", "answer(False)", "Go on", show=False),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("[b]Stop this run?[/b]\n")
            yield Static(
                "It writes a checkpoint and ends after this step; `--resume auto` goes on from "
                "there. To leave it running, press [b]d[/b] instead.\n"
            )
            yield Static("[b]y[/b] stop      [b]n[/b] go on training")

    def action_answer(self, stop: bool) -> None:
        """Close with the answer."""
        self.dismiss(stop)


class HelpScreen(ModalScreen[None]):
    """Keys from the registry, and what the panels show."""

    DEFAULT_CSS = DIALOG_CSS.format(name="HelpScreen", width=74)
    BINDINGS = [Binding("escape,question_mark,q,enter", "dismiss", "Close", show=False)]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(help_text())


def help_text() -> str:
    """All keys by group, then the panels."""
    parts = []
    for group in GROUPS:
        rows = [
            f"  [b]{_escaped(_keys_text(action.keys)):<12}[/b] {action.about}"
            for action in ACTIONS
            if action.group == group
        ]
        parts.append(f"[b $accent]{group}[/]\n" + "\n".join(rows))
    panels = [f"  [b]{panel.title:<16}[/b] {panel.about}" for panel in PANELS.values()]
    parts.append("[b $accent]Panels[/]  (tab to go from one to the next)\n" + "\n".join(panels))
    letters = "  G device   C host   N disk   > to the device   < to the host   - not known now"
    parts.append("[b $accent]Letters[/]\n" + letters)
    return "\n\n".join(parts)


def _keys_text(keys: str) -> str:
    from fluxtui.actions import KEY_TEXTS

    return " ".join(KEY_TEXTS.get(key, key.replace("ctrl+", "^")) for key in keys.split(","))


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
