"""The steps of settings: the method, the training, and the strategy with its dial."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.content import Content

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.answers import DIAL, Dial
from fluxtui.answers.rows import METHODS, SettingRow, rows_of, value_text
from fluxtui.wizard.engine.plan_preview import dial_settings
from fluxtui.wizard.pages.method import method_page
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.pages.training import training_page
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.step import Wished
from fluxtui.wizard.steps.widgets import Drawn


class TrainingStep(AskingStep, can_focus=True):
    """Walks the settings with ↑ ↓, turns one with ← →; typing opens the field of a setting."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(
            ("wizard_value_before", "wizard_value_after", "wizard_edit", "wizard_default")
        ),
        *own_bindings(("list_up", "list_down"), list_up="walk(-1)", list_down="walk(1)"),
    ]
    BEGINS_A_VALUE = "0123456789./~"

    def __init__(self) -> None:
        super().__init__("training")

    def draw(self, width: int) -> Content:
        """Draw the page."""
        return training_page(self.view, width, self._cursor)

    @property
    def walked(self) -> int:
        """Return how many lines the cursor walks over."""
        return len(self.rows)

    @property
    def rows(self) -> tuple[SettingRow, ...]:
        """Return the settings of the page."""
        return rows_of("training", of_images=self.view.answers.of_images)

    @property
    def under_cursor(self) -> SettingRow:
        """Return the setting under the cursor."""
        return self.rows[self._cursor]

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
        """Open the field with the present value."""
        row = self.under_cursor
        self.open(row, value_text(self.view.answers.settings.get(row.key)))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the setting under the pointer; on a second click type its value."""
        page = self.query_one(Drawn)
        at = event.get_content_offset(page) if event.widget is page else None
        lines = self.draw(page.content_size.width).plain.split("\n")
        line = lines[at.y] if at is not None and at.y < len(lines) else ""
        hit = [i for i, row in enumerate(self.rows) if line[2:].lstrip().startswith(f"{row.name} ")]
        if hit and hit[-1] == self._cursor:
            self.action_edit()
        elif hit:
            self.action_walk(hit[-1] - self._cursor)


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
        """Return how many lines the cursor walks over."""
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


class MethodStep(AskingStep, can_focus=True):
    """Chooses with ← →, and sets adapters' settings with their letters."""

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
            chosen = METHODS[at]
            usual = self.view.answers.usual_method
            self.answer({"method.name": None if chosen == usual else chosen})

    def action_again(self) -> None:
        """Plan the methods once more."""
        self.post_message(Wished("plan"))
