"""The step with the dial: plans as cards, numbers that can be changed, reasons on request."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.answers import DIAL, Dial
from fluxtui.wizard.engine.ranked import dial_settings
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.step import Wished


class StrategyStep(AskingStep, can_focus=True):
    """Turns the dial with ← →, changes a number with its letter, walks the choices with ↑ ↓."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(
            (
                "wizard_faster", "wizard_smaller", "wizard_batch", "wizard_chunk", "wizard_steps",
                "wizard_offload", "wizard_why", "wizard_again", "wizard_measure",
            )
        ),
        *own_bindings(("list_up", "list_down"), list_up="walk(-1)", list_down="walk(1)"),
    ]  # fmt: skip

    def __init__(self) -> None:
        super().__init__("strategy")
        self._why = False

    def draw(self, width: int) -> Content:
        """Draw the page."""
        return strategy_page(self.view, width, cursor=self._cursor, why=self._why)

    @property
    def walked(self) -> int:
        """How many lines the cursor walks over."""
        plan = self.view.plan.value
        return len(plan.choices) if plan else 0

    def action_dial(self, offset: int) -> None:
        """Turn the dial; a plan on it brings its settings along."""
        cards = self.view.cards
        stops = [stop for stop in DIAL if stop == "auto" or dial_settings(cards, stop)]
        before: Dial = self.view.answers.dial
        index = (stops.index(before) if before in stops else 0) + offset
        if 0 <= index < len(stops):
            stop = stops[index]
            self.answer({"dial": stop, "dial_settings": dial_settings(cards, stop)})

    def action_why(self) -> None:
        """Show all reasons, or only that of the choice under the cursor."""
        self._why = not self._why
        self.show(self.view)

    def action_again(self) -> None:
        """Plan the same answers once more."""
        self.post_message(Wished("plan"))

    def action_measure(self) -> None:
        """Measure the machine once more."""
        self.post_message(Wished("measure"))
