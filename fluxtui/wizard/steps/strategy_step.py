"""The step with the dial: plans as cards, numbers that can be changed, reasons on request."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content

from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.answers import DIAL, OFFLOADS, Dial
from fluxtui.wizard.engine.ranked import dial_settings
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.step import Wished
from fluxtui.wizard.steps.widgets import Drawn


class StrategyStep(AskingStep, can_focus=True):
    """Turns the dial with ← →, changes a number with its letter, walks the choices with ↑ ↓."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *own_bindings(
            (
                "wizard_faster",
                "wizard_smaller",
                "wizard_batch",
                "wizard_chunk",
                "wizard_steps",
                "wizard_offload",
                "wizard_why",
                "wizard_again",
            )
        ),
        *own_bindings(("list_up", "list_down"), list_up="walk(-1)", list_down="walk(1)"),
    ]

    ASKED = {
        "batch_rows": "rows of one batch",
        "chunk_rows": "rows computed at once in a block",
        "steps": "optimizer steps",
    }

    def __init__(self) -> None:
        super().__init__("strategy")
        self._cursor = 0
        self._why = False

    def compose(self) -> ComposeResult:
        yield self.make_box()
        yield Drawn(self._draw)

    def action_dial(self, offset: int) -> None:
        """Turn the dial; a plan on it brings its settings along."""
        cards = self.view.cards
        stops = [stop for stop in DIAL if stop == "auto" or dial_settings(cards, stop)]
        before: Dial = self.view.answers.dial
        index = (stops.index(before) if before in stops else 0) + offset
        if 0 <= index < len(stops):
            stop = stops[index]
            self.answer({"dial": stop, "dial_settings": dial_settings(cards, stop)})

    def action_offload(self) -> None:
        """Choose the next offload setting, the first one after the last."""
        index = OFFLOADS.index(self.view.answers.offload) + 1
        self.answer({"offload": OFFLOADS[index % len(OFFLOADS)]})

    def action_why(self) -> None:
        """Show all reasons, or only that of the choice under the cursor."""
        self._why = not self._why
        self.show(self.view)

    def action_walk(self, offset: int) -> None:
        """Move the cursor over the choices."""
        plan = self.view.plan.value
        last = len(plan.choices) - 1 if plan else 0
        self._cursor = max(0, min(last, self._cursor + offset))
        self.show(self.view)
        self.call_after_refresh(self._keep_in_sight)

    def action_again(self) -> None:
        """Plan the same answers once more."""
        self.post_message(Wished("plan"))

    def _draw(self, width: int) -> Content:
        view = self.view
        return strategy_page(view, width, cursor=self._cursor, why=self._why)

    def _keep_in_sight(self) -> None:
        drawn = self.query_one(Drawn)
        lines = self._draw(drawn.content_size.width).plain.split("\n")
        marked = [number for number, line in enumerate(lines) if line.startswith(drawing.CURSOR)]
        if marked:
            top = marked[-1] + drawn.virtual_region.y
            below = top + 3 - self.size.height - self.scroll_offset.y
            if below > 0:
                self.scroll_to(y=self.scroll_offset.y + below, animate=False)
            elif top < self.scroll_offset.y:
                self.scroll_to(y=0 if self._cursor == 0 else top, animate=False)
