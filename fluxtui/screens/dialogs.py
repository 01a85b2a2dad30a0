"""Help, and the question before something is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from fluxtrain.events.printable import printable
from fluxtui.actions.table import ACTIONS, GROUPS, Action
from fluxtui.app_base import AppBase
from fluxtui.panels import PANELS
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, Span, width_of, wrapped

WIDEST_PERCENT, HIGHEST_PERCENT = 96, 94  # of the screen, as in the style below
HELP_CELLS = 78
AROUND_HELP_CELLS = 6  # border and padding
AROUND_HELP_ROWS = 6  # these, and the line of keys with a blank one
LETTERS = ("G device, C host, N disk", "> to the device, < to the host, - not known now")
DIALOG_CSS = """
{name} {{ align: center middle; }}
{name} > .dialog {{
    width: {width}; max-width: 96%; height: auto; max-height: 94%;
    background: $surface; border: round $primary; padding: 1 2;
}}
"""


class QuestionDialog(ModalScreen[bool]):
    """Asks before an action: `y` does it, anything else does not."""

    DEFAULT_CSS = DIALOG_CSS.format(name="QuestionDialog", width=72)
    BINDINGS = [
        Binding("y", "answer(True)", "Yes", show=False),
        Binding("n,escape,enter,q,Q,r,D", "answer(False)", "No", show=False),
    ]

    def __init__(self, question: str, told: str, yes: str, no: str) -> None:
        """Ask with what is told about it; `yes` and `no` say what each answer does."""
        super().__init__()
        self._question, self._told, self._answers = question, told, (yes, no)

    def compose(self) -> ComposeResult:
        yes, no = self._answers
        with Vertical(classes="dialog"):
            yield Static(f"{printable(self._question)}\n", markup=False)
            yield Static("\n".join(map(printable, self._told.split("\n"))), markup=False)
            yield Static(f"\n[b]y[/b] {yes}      [b]n[/b] {no}")

    def action_answer(self, yes: bool) -> None:
        """Close with the answer."""
        self.dismiss(yes)


class HelpScreen(ModalScreen[None]):
    """The keys of one screen from the registry, and what its panels show."""

    DEFAULT_CSS = DIALOG_CSS.format(name="HelpScreen", width=HELP_CELLS)
    BINDINGS = [Binding("escape,question_mark,q,enter", "dismiss", "Close", show=False)]
    AUTO_FOCUS = "#help"

    def __init__(self, screen: str = "", panels: Sequence[str] = ()) -> None:
        super().__init__()
        self._of, self._panels = screen, panels

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield ScrollingLines(id="help")
            yield Static("\n[b]↑ ↓[/b] scroll      [b]esc[/b] close")

    def on_mount(self) -> None:
        self._fit()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        """Fit the text to the free height: lines cut off by the dialog could not be scrolled to."""
        room = self.size.height * HIGHEST_PERCENT // 100 - AROUND_HELP_ROWS
        rows = max(1, min(len(self._lines), room))
        self.query_one("#help").styles.height = rows
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Draw the lines that fit; the rest scrolls."""
        palette = cast("AppBase", self.app).palette.over("surface")
        self.query_one("#help", ScrollingLines).show_all(self._lines, palette)

    @property
    def _lines(self) -> list[Line]:
        width = min(HELP_CELLS, self.size.width * WIDEST_PERCENT // 100) - AROUND_HELP_CELLS
        app = cast("AppBase", self.app)
        return help_lines(app.actions, self._of, self._panels, width, app.view.on_gpu)


def help_lines(
    actions: Sequence[Action] = ACTIONS,
    screen: str = "",
    panels: Sequence[str] = tuple(PANELS),
    width: int = 72,
    on_gpu: bool = True,
) -> list[Line]:
    """List the keys by group, then panels and letters; of all screens without a `screen`."""
    lines: list[Line] = []
    for group in GROUPS:
        shown = [
            action
            for action in actions
            if action.group == group and (not screen or action.works_on(screen))
        ]
        if shown:
            lines.append(((group, "accent"),))
            cells = max(8, *(len(action.all_keys_text) for action in shown))
            for action in shown:
                lines += _beside(
                    (f"  {action.all_keys_text:<{cells}} ", "key"), action.about, width
                )
            lines.append(BLANK)
    if panels:
        lines.append((("Panels", "accent"), ("   tab goes from one to the next", "dim")))
        for name in panels:
            lines += _beside(
                (f"  {_title(name, on_gpu):<15} ", "strong"), PANELS[name].about, width
            )
    lines += [BLANK, (("Letters", "accent"),)]
    return [*lines, *(line for part in LETTERS for line in _beside(("  ", "text"), part, width))]


def _title(name: str, on_gpu: bool) -> str:
    panel = PANELS[name]
    return panel.title if on_gpu else panel.title_off_gpu or panel.title


def _beside(head: Span, text: str, width: int) -> list[Line]:
    """Return a text to the right of its head, wrapped below itself."""
    indent = width_of((head,))
    parts = wrapped(text, max(8, width - indent))
    return [
        (head if i == 0 else (" " * indent, "text"), (part, "text")) for i, part in enumerate(parts)
    ]
