"""The base of all steps: a page that draws a `WizardView` and posts what the user wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Input

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.rows import StepName
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.wizard.steps.widgets import Drawn

Wish = Literal["measure", "plan", "try", "copy yaml", "copy command"]
DrawPage = Callable[[WizardView, int], Content]


class AnswersChanged(Message):
    """Posted when the user changed answers on this page: fields, or settings by their
    dotted keys."""

    def __init__(self, changes: Mapping[str, Any], page: StepName | None = None) -> None:
        super().__init__()
        self.changes = changes
        self.page = page


class Wished(Message):
    """Posted when the user asks for an action that is no answer."""

    def __init__(self, wish: Wish) -> None:
        super().__init__()
        self.wish = wish


class WizardStep(VerticalScroll, can_focus=False):
    """One page of the wizard."""

    DEFAULT_CSS = """
    WizardStep { height: 1fr; scrollbar-size-vertical: 1; scrollbar-background: $background; }
    WizardStep > Drawn, WizardStep > ChoiceList { margin-bottom: 1; }
    """
    name_of_step: StepName

    def __init__(self, name: StepName) -> None:
        super().__init__(id=name)
        self.name_of_step = name
        self.typed_at = 0  # where in its field the next key that was typed on the page belongs
        self.view = WizardView()

    def show(self, view: WizardView) -> None:
        """Draw this view."""
        self.view = view
        for drawn in self.query(Drawn):
            drawn.refresh(layout=True)

    def take_focus(self) -> None:
        """Put the focus where the first key press is wanted."""

    def answer(self, changes: Mapping[str, Any]) -> None:
        """Post the user's changes."""
        self.post_message(AnswersChanged(changes, self.name_of_step))

    def insert_late(self, box: Input, character: str) -> None:
        """Insert a key that was on its way to this page when the field got the focus.

        It arrives after keys that went to the field directly, and belongs in front of them.
        """
        cursor = box.cursor_position
        box.insert(character, self.typed_at)
        if cursor > self.typed_at:
            box.cursor_position = cursor + 1
        self.typed_at += 1

    def leave(self) -> bool:
        """Handle Escape; return True when it was for something inside this page."""
        return False


class LaunchStep(WizardStep, can_focus=True):
    """The last page: it draws, scrolls, and posts the user's actions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(("list_up", "list_down"), list_up="scroll_up", list_down="scroll_down"),
        *own_bindings(("wizard_again", "wizard_try", "wizard_yaml", "wizard_command")),
    ]

    def __init__(self, draw: DrawPage) -> None:
        super().__init__("launch")
        self._draw = draw

    def compose(self) -> ComposeResult:
        yield Drawn(lambda width: self._draw(self.view, width))

    def take_focus(self) -> None:
        """Focus the page itself, so that its keys work."""
        self.focus()

    def action_again(self) -> None:
        """Plan the same answers once more."""
        self.post_message(Wished("plan"))

    def action_wish(self, wish: Wish) -> None:
        """Post the user's action."""
        self.post_message(Wished(wish))
