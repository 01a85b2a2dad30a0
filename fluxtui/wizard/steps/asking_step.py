"""A page of settings: each is set in one field at the foot of the page, or turned by a key."""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input

from fluxtrain.errors import BadInput
from fluxtui.answers.launching import run_folder_problem
from fluxtui.answers.rows import (
    BY_KEY,
    SettingRow,
    declared,
    default_text,
    read,
    turned,
    value_text,
)
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.wizard.steps.path_entry import PathEntry
from fluxtui.wizard.steps.step import WizardStep
from fluxtui.wizard.steps.widgets import Drawn

HELP_LINES = 3


class AskingStep(WizardStep, can_focus=True):
    """Draws a page with a cursor; Escape closes the field and keeps what was set before."""

    DEFAULT_CSS = """
    AskingStep #asked { display: none; dock: bottom; height: auto; background: $background; }
    AskingStep Input { height: 3; background: transparent; }
    AskingStep Input, AskingStep Input:focus { border: round $accent; }
    """
    BEGINS_A_VALUE: ClassVar[str] = ""  # characters that open the field
    _problem = ""  # with what was typed last
    _cursor = 0
    _row: SettingRow | None = None  # whose field is open

    def draw(self, width: int) -> Content:
        """Draw the page."""
        raise NotImplementedError

    @property
    def walked(self) -> int:
        """Return how many lines the cursor walks over."""
        return 0

    def compose(self) -> ComposeResult:
        yield Drawn(self.draw, id=f"{self.name_of_step}-page")
        box = PathEntry(folders_only=True, id=f"{self.name_of_step}-input")
        box.select_on_focus = False  # what is typed on the page goes on in the field
        with Vertical(id="asked"):
            yield Drawn(self._draw_help)
            yield box

    def take_focus(self) -> None:
        """Focus the page itself, so that its keys work."""
        self.focus()

    def leave(self) -> bool:
        """Close the field on Escape and keep its earlier value."""
        was_open = self.asks
        self._close()
        return was_open

    @property
    def asks(self) -> bool:
        """Return whether the field is open."""
        return bool(self.query_one("#asked").display)

    # --- settings -----------------------------------------------------------------------------

    def action_ask(self, key: str) -> None:
        """Open the field of a setting, or take its next choice; nothing where the
        method lacks it."""
        row = BY_KEY[key]
        if self.view.answers.method not in row.methods:
            return
        if declared(row).choices:
            self.turn(row, 1)
        else:
            self.open(row, value_text(self.view.answers.settings.get(key)))

    def turn(self, row: SettingRow, offset: int) -> None:
        """Take the usual value `offset` places on."""
        self.answer({row.key: turned(row, self.view.answers.settings.get(row.key), offset)})

    def open(self, row: SettingRow, text: str) -> None:
        """Open the field with a text."""
        box = self._box
        self._row, self._problem = row, ""
        box.completes = row.is_folder
        box.border_title = f"{row.name}; empty: {default_text(row)}"
        box.value = text
        self.query_one("#asked").display = True
        box.focus()
        box.cursor_position = len(text)
        self.show(self.view)

    def take_enter(self) -> bool:
        """Read the open field; False if Enter is for the page."""
        if self.asks:
            self._read(self._box.value)
            return True
        return False

    def on_key(self, event: events.Key) -> None:
        """Open the field when a value is typed; keys that arrive before the field has the focus
        are inserted."""
        box, character = self._box, event.character or ""
        if box.has_focus or not event.is_printable or not character:
            return
        if self.asks:  # it was on its way here when the field got the focus
            self.insert_late(box, character)
        elif character in self.BEGINS_A_VALUE and self.under_cursor is not None:
            self.open(self.under_cursor, character)
            self.typed_at = 1
        else:
            return
        event.stop()
        event.prevent_default()

    @property
    def under_cursor(self) -> SettingRow | None:
        """Return the setting under the cursor, where it walks over settings."""
        return None

    @on(Input.Changed)
    def _typed(self) -> None:
        if self._problem:
            self._problem = ""
            self.show(self.view)

    @on(Input.Submitted)
    def _given(self, event: Input.Submitted) -> None:
        event.stop()
        self._read(event.value)

    def _read(self, text: str) -> None:
        assert self._row is not None
        try:
            value = read(self._row, text)
            problem = run_folder_problem(str(value)) if self._row.is_folder and value else ""
        except (BadInput, OSError) as error:
            problem, value = str(error), None
        if problem:
            self._problem = problem
            self.show(self.view)
            return
        row = self._row
        self._close()
        self.answer({row.key: value})

    def _close(self) -> None:
        if self.asks:
            self.query_one("#asked").display = False
            self._row, self._problem = None, ""
            self.focus()

    @property
    def _box(self) -> PathEntry:
        return self.query_one(PathEntry)

    def _draw_help(self, width: int) -> Content:
        if self._problem:
            return drawing.problem(self._problem, width)
        if self._row is None:
            return Content("")
        lines = drawing.in_lines(declared(self._row).help, width)
        return Content.styled("\n".join(lines[:HELP_LINES]), drawing.MUTED)

    # --- the cursor ---------------------------------------------------------------------------

    def action_walk(self, offset: int) -> None:
        """Move the cursor."""
        self._cursor = max(0, min(self.walked - 1, self._cursor + offset))
        self.show(self.view)
        self.call_after_refresh(self._keep_in_sight)

    def show(self, view: WizardView) -> None:
        """Draw this view."""
        super().show(view)
        self._cursor = max(0, min(self.walked - 1, self._cursor))

    def _keep_in_sight(self) -> None:
        """Scroll so that the line with the cursor is on screen."""
        page = self.query_one(Drawn)
        lines = self.draw(page.content_size.width).plain.split("\n")
        marked = [number for number, line in enumerate(lines) if line.startswith(drawing.CURSOR)]
        if marked:
            top = marked[-1] + page.virtual_region.y
            below = top + 3 - self.size.height - self.scroll_offset.y
            if below > 0:
                self.scroll_to(y=self.scroll_offset.y + below, animate=False)
            elif top < self.scroll_offset.y:
                self.scroll_to(y=0 if self._cursor == 0 else top, animate=False)
