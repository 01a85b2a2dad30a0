"""The step of the method: cards beside each other, and the questions about adapters."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.answers import METHODS
from fluxtui.answers.questions import ADAPTER_QUESTIONS, adapter_questions
from fluxtui.wizard.pages.method import method_page
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.step import Wished
from fluxtui.wizard.steps.widgets import Drawn


class MethodStep(AskingStep, can_focus=True):
    """Chooses with ← →, and sets what belongs to adapters with their letters."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(("wizard_method_before", "wizard_method_after", "wizard_again")),
        *own_bindings(tuple(question.action for question in ADAPTER_QUESTIONS)),
        *own_bindings(("list_up", "list_down"), list_up="scroll_up", list_down="scroll_down"),
    ]
    ASKED = {one.field: one.title for one in ADAPTER_QUESTIONS if not one.options}
    TEXTS = ("targets",)

    def __init__(self) -> None:
        super().__init__("method")

    def compose(self) -> ComposeResult:
        yield self.make_box()
        yield Drawn(lambda width: method_page(self.view, width))

    def action_method(self, offset: int) -> None:
        """Choose the method beside; a plan on the dial was made for the one before."""
        at = METHODS.index(self.view.answers.method) + offset
        if 0 <= at < len(METHODS):
            self.answer({"method": METHODS[at], "dial_settings": {}})

    def action_number(self, field: str) -> None:
        """Open the field, where the method has such a question."""
        if self._asks(field):
            super().action_number(field)

    def action_cycle(self, field: str) -> None:
        """Take the next option, round about, where the method has such a question."""
        options = next(one.options for one in ADAPTER_QUESTIONS if one.field == field)
        if self._asks(field):
            at = list(options).index(getattr(self.view.answers, field)) + 1
            self.answer({field: options[at % len(options)]})

    def action_again(self) -> None:
        """Plan the methods once more."""
        self.post_message(Wished("plan"))

    def _asks(self, field: str) -> bool:
        questions = adapter_questions(self.view.answers.method)
        return any(question.field == field for question in questions)
