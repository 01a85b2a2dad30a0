"""Help, and the question before a run is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from fluxtrain.events.printable import printable
from fluxtrain.units import bytes_text
from fluxtui.actions.table import ACTIONS, GROUPS, Action
from fluxtui.app_base import AppBase
from fluxtui.panels import PANELS
from fluxtui.panels.panel import key_of
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, Span, width_of, wrapped
from fluxtui.words import counted

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


class StopDialog(ModalScreen[bool]):
    """Stop the run? `y` stops, anything else does not."""

    DEFAULT_CSS = DIALOG_CSS.format(name="StopDialog", width=62)
    BINDINGS = [
        Binding("y", "answer(True)", "Stop", show=False),
        Binding("n,escape,enter,q,Q", "answer(False)", "Go on", show=False),
    ]

    def compose(self) -> ComposeResult:
        leave = key_of(cast("AppBase", self.app).view, "detach")
        with Vertical(classes="dialog"):
            yield Static("[b]Stop this run?[/b]\n")
            yield Static(
                "It writes a checkpoint and ends after this step; --resume auto goes on from "
                f"there. To leave it running and close this window, press {leave} instead.\n",
                markup=False,
            )
            yield Static("[b]y[/b] stop      [b]n[/b] go on training")

    def action_answer(self, stop: bool) -> None:
        """Close with the answer."""
        self.dismiss(stop)


class ResumeDialog(ModalScreen[bool]):
    """Go on with a run? `y` does, anything else does not."""

    DEFAULT_CSS = DIALOG_CSS.format(name="ResumeDialog", width=72)
    BINDINGS = [
        Binding("y", "answer(True)", "Resume", show=False),
        Binding("n,escape,enter,q,r", "answer(False)", "Leave it", show=False),
    ]

    def __init__(self, name: str, told: str) -> None:
        super().__init__()
        self._run, self._told = name, told

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(f"Resume {printable(self._run)}?\n", markup=False)
            yield Static(f"{printable(self._told)}\n", markup=False)
            yield Static("[b]y[/b] resume      [b]n[/b] leave it")

    def action_answer(self, resume: bool) -> None:
        """Close with the answer."""
        self.dismiss(resume)


class DeleteDialog(ModalScreen[bool]):
    """Delete a run? `y` deletes, anything else does not."""

    DEFAULT_CSS = DIALOG_CSS.format(name="DeleteDialog", width=72)
    BINDINGS = [
        Binding("y", "answer(True)", "Delete", show=False),
        Binding("n,escape,enter,q,D", "answer(False)", "Keep", show=False),
    ]

    def __init__(self, name: str, size_bytes: int, step: int | None, kept: str = "") -> None:
        super().__init__()
        self._run, self._size_bytes, self._step, self._kept = name, size_bytes, step, kept

    def compose(self) -> ComposeResult:
        done = "" if self._step is None else f" of {counted(self._step, 'step')}"
        size = bytes_text(self._size_bytes)
        text = f"{size}: checkpoints, model and log{done}.\nThey cannot be brought back.\n"
        text += f"{self._kept}.\n" if self._kept else ""
        with Vertical(classes="dialog"):
            yield Static(f"Delete {printable(self._run)}?\n", markup=False)
            yield Static(text, markup=False)
            yield Static("[b]y[/b] delete      [b]n[/b] keep")

    def action_answer(self, delete: bool) -> None:
        """Close with the answer."""
        self.dismiss(delete)


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
        """Draw what fits; the rest scrolls."""
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
    """Return a text beside its head, wrapped below itself."""
    indent = width_of((head,))
    parts = wrapped(text, max(8, width - indent))
    return [
        (head if i == 0 else (" " * indent, "text"), (part, "text")) for i, part in enumerate(parts)
    ]
