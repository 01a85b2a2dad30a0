"""The step of the method: cards beside each other, and the settings of adapters."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.rows import METHODS, rows_of
from fluxtui.wizard.pages.method import method_page
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.step import Wished


class MethodStep(AskingStep, can_focus=True):
    """Chooses with ← →, and sets what belongs to adapters with their letters."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(("wizard_method_before", "wizard_method_after", "wizard_again")),
        *own_bindings(tuple(row.action for row in rows_of("method", "qlora"))),
        *own_bindings(("list_up", "list_down"), list_up="scroll_up", list_down="scroll_down"),
    ]

    def __init__(self) -> None:
        super().__init__("method")

    def draw(self, width: int) -> Content:
        """Draw the page."""
        return method_page(self.view, width)

    def action_method(self, offset: int) -> None:
        """Choose the method to the left or to the right."""
        at = METHODS.index(self.view.answers.method) + offset
        if 0 <= at < len(METHODS):
            self.answer({"method.name": METHODS[at] if at else None})

    def action_again(self) -> None:
        """Plan the methods once more."""
        self.post_message(Wished("plan"))
