"""The step of the training: a line a setting, changed with the arrows or typed."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.content import Content

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.rows import SettingRow, rows_of, value_text
from fluxtui.wizard.pages.training import training_page
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.widgets import Drawn


class TrainingStep(AskingStep, can_focus=True):
    """Walks the settings with ↑ ↓, turns one with ← →; what is typed opens its field."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(
            ("wizard_value_before", "wizard_value_after", "wizard_edit", "wizard_default")
        ),
        *own_bindings(("list_up", "list_down"), list_up="walk(-1)", list_down="walk(1)"),
    ]
    BEGINS_A_VALUE = "0123456789./~"
    ROWS = rows_of("training")

    def __init__(self) -> None:
        super().__init__("training")

    def draw(self, width: int) -> Content:
        """Draw the page."""
        return training_page(self.view, width, self._cursor)

    @property
    def walked(self) -> int:
        """How many lines the cursor walks over."""
        return len(self.ROWS)

    @property
    def under_cursor(self) -> SettingRow:
        """The setting under the cursor."""
        return self.ROWS[self._cursor]

    def action_turn_value(self, offset: int) -> None:
        """Take the next usual value, or the default."""
        if self.under_cursor.is_folder:
            self.action_edit()
        else:
            self.turn(self.under_cursor, offset)

    def action_default(self) -> None:
        """Leave the setting to the trainer again."""
        self.answer({self.under_cursor.key: None})

    def action_edit(self) -> None:
        """Open the field with what is set."""
        row = self.under_cursor
        self.open(row, value_text(self.view.answers.settings.get(row.key)))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the setting under the pointer; on a second click type its value."""
        page = self.query_one(Drawn)
        at = event.get_content_offset(page) if event.widget is page else None
        lines = self.draw(page.content_size.width).plain.split("\n")
        line = lines[at.y] if at is not None and at.y < len(lines) else ""
        hit = [i for i, row in enumerate(self.ROWS) if line[2:].lstrip().startswith(f"{row.name} ")]
        if hit and hit[-1] == self._cursor:
            self.action_edit()
        elif hit:
            self.action_walk(hit[-1] - self._cursor)
