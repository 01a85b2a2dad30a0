"""The step of the training: a line a setting, changed with the arrows or typed."""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Input

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.launching import run_folder_problem
from fluxtui.answers.training import (
    TRAINING_QUESTIONS,
    TrainingQuestion,
    Value,
    answer_text,
    changes_of,
    read_answer,
    turned,
)
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.training import training_page
from fluxtui.wizard.steps.path_entry import PathEntry
from fluxtui.wizard.steps.step import Step
from fluxtui.wizard.steps.widgets import Drawn

BEGINS_A_VALUE = "0123456789./~"


class TrainingStep(Step, can_focus=True):
    """Walks the settings with ↑ ↓, turns one with ← →; what is typed opens its field."""

    DEFAULT_CSS = """
    TrainingStep Input {
        display: none; height: 3; border: round $accent; background: transparent;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(
            ("wizard_value_before", "wizard_value_after", "wizard_edit", "wizard_default")
        ),
        *own_bindings(("list_up", "list_down"), list_up="walk(-1)", list_down="walk(1)"),
    ]

    def __init__(self) -> None:
        super().__init__("training")
        self._cursor = 0
        self._problem = ""  # with what was typed last
        self._typed_at = 0  # where in the field the next key that was typed on the page belongs

    def compose(self) -> ComposeResult:
        box = PathEntry(folders_only=True, id="training-input")
        box.select_on_focus = False  # what is typed on the page goes on in the field
        yield box
        yield Drawn(self._draw)

    def take_focus(self) -> None:
        """Focus the page itself, so that its keys work."""
        self.focus()

    def leave(self) -> bool:
        """Escape closes the field and keeps what was set before."""
        was_open = bool(self._box.display)
        self._close()
        return was_open

    @property
    def question(self) -> TrainingQuestion:
        """The setting under the cursor."""
        return TRAINING_QUESTIONS[self._cursor]

    def action_walk(self, offset: int) -> None:
        """Move the cursor over the settings."""
        last = len(TRAINING_QUESTIONS) - 1
        self._cursor = max(0, min(last, self._cursor + offset))
        self.show(self.view)
        self.call_after_refresh(self._keep_in_sight)

    def action_turn_value(self, offset: int) -> None:
        """Take the next usual value, or the default."""
        present = getattr(self.view.answers, self.question.field)
        if self.question.kind == "folder":
            self.action_edit()
        else:
            self._set(turned(self.question, present, offset))

    def action_default(self) -> None:
        """Leave the setting to the trainer again."""
        self._set("" if self.question.kind == "folder" else None)

    def action_edit(self) -> None:
        """Open the field with what is set."""
        present = getattr(self.view.answers, self.question.field)
        self._open("" if present in (None, "") else answer_text(self.question, present))

    def on_key(self, event: events.Key) -> None:
        """Open the field by typing a value; keys that come before it has the focus are its own."""
        box, character = self._box, event.character or ""
        if box.has_focus or not event.is_printable or not character:
            return
        if box.display:  # it was on its way here when the field got the focus
            cursor = box.cursor_position
            box.insert(character, self._typed_at)
            if cursor > self._typed_at:
                box.cursor_position = cursor + 1
            self._typed_at += 1
        elif character in BEGINS_A_VALUE:
            self._open(character)
            self._typed_at = 1
        else:
            return
        event.stop()
        event.prevent_default()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the setting under the pointer; on a second click type its value."""
        drawn = self.query_one(Drawn)
        if event.widget is not drawn:
            return
        lines = self._draw(drawn.content_size.width).plain.split("\n")
        names = [question.name for question in TRAINING_QUESTIONS]
        at = event.get_content_offset(drawn)
        line = lines[at.y] if at is not None and at.y < len(lines) else ""
        hit = [i for i, name in enumerate(names) if f" {name} " in line]
        if hit and hit[-1] == self._cursor:
            self.action_edit()
        elif hit:
            self.action_walk(hit[-1] - self._cursor)

    @on(Input.Changed, "#training-input")
    def _typed(self) -> None:
        if self._problem:
            self._problem = ""
            self.show(self.view)

    def take_enter(self) -> bool:
        """Read what is in the field, if it is open; False if Enter is for the page."""
        if not self._box.display:
            return False
        self._read(self._box.value)
        return True

    @on(Input.Submitted, "#training-input")
    def _given(self, event: Input.Submitted) -> None:
        event.stop()
        self._read(event.value)

    def _read(self, text: str) -> None:
        question = self.question
        try:
            value = read_answer(question, text)
            problem = run_folder_problem(str(value)) if question.kind == "folder" else ""
        except (ValueError, OSError) as error:
            problem, value = str(error), None
        if problem:
            self._problem = problem
            self.show(self.view)
            return
        self._close()
        self._set(value)

    def _set(self, value: Value) -> None:
        self.answer(changes_of(self.question, value))

    @property
    def _box(self) -> PathEntry:
        return self.query_one("#training-input", PathEntry)

    def _open(self, text: str) -> None:
        box, question = self._box, self.question
        box.completes = question.kind == "folder"
        box.border_title = f"{question.name}; empty: {question.default}"
        box.value, box.display, self._problem = text, True, ""
        box.focus()
        box.cursor_position = len(text)

    def _close(self) -> None:
        if self._box.display:
            self._box.display, self._problem = False, ""
            self.focus()

    def _draw(self, width: int) -> Content:
        return training_page(self.view, width, self._cursor, self._problem)

    def _keep_in_sight(self) -> None:
        drawn = self.query_one(Drawn)
        lines = self._draw(drawn.content_size.width).plain.split("\n")
        marked = [number for number, line in enumerate(lines) if line.startswith(drawing.CURSOR)]
        if marked:
            top = marked[-1] + drawn.virtual_region.y
            if top + 1 > self.size.height + self.scroll_offset.y:
                self.scroll_to(y=top + 1 - self.size.height, animate=False)
            elif top < self.scroll_offset.y:
                self.scroll_to(y=0 if self._cursor == 0 else top, animate=False)
