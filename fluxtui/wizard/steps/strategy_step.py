"""The step with the dial: plans as cards, numbers that can be changed, reasons on request."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.widgets import Input

from fluxtui.actions.key_map import own_bindings
from fluxtui.widgets.entry import Entry
from fluxtui.wizard.answers.answers import DIAL, OFFLOADS, Dial
from fluxtui.wizard.engine.ranked import dial_settings
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.steps.step import Step, Wished
from fluxtui.wizard.steps.widgets import Drawn

_NUMBERS = {
    "batch_rows": "rows of one batch",
    "chunk_rows": "rows computed at once in a block",
    "steps": "optimizer steps",
}


class StrategyStep(Step, can_focus=True):
    """Turns the dial with ← →, changes a number with its letter, walks the choices with ↑ ↓."""

    DEFAULT_CSS = """
    StrategyStep Input {
        display: none; height: 3; width: 46; border: round $accent; background: transparent;
    }
    """
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

    def __init__(self) -> None:
        super().__init__("strategy")
        self._asked_for = ""
        self._cursor = 0
        self._why = False

    def compose(self) -> ComposeResult:
        box = Entry(type="integer", placeholder="as the plan says", id="number-input")
        box.restrict = r"\d{0,9}"
        yield box
        yield Drawn(self._draw)

    def take_focus(self) -> None:
        """The page itself, so that its keys work."""
        self.focus()

    def leave(self) -> bool:
        """Escape closes the field of a number and keeps what was set before."""
        was_open = bool(self._box.display)
        self._close()
        return was_open

    @property
    def asks_for_a_number(self) -> bool:
        """The field of a number is open."""
        return bool(self._box.display)

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
        """The next offload setting, round about."""
        index = OFFLOADS.index(self.view.answers.offload) + 1
        self.answer({"offload": OFFLOADS[index % len(OFFLOADS)]})

    def action_number(self, field: str) -> None:
        """Open the field of a number."""
        value = getattr(self.view.answers, field)
        self._asked_for = field
        self._box.value = "" if value is None else str(value)
        self._box.border_title = f"{_NUMBERS[field]}; empty: auto"
        self._box.display = True
        self._box.focus()

    def action_why(self) -> None:
        """All reasons, or only that of the choice under the cursor."""
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

    @property
    def _box(self) -> Input:
        return self.query_one("#number-input", Input)

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

    def _close(self) -> None:
        self._box.display = False
        self.focus()

    @on(Input.Submitted, "#number-input")
    def _given(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.strip()
        if text and int(text) < 1:
            self.notify("a whole number from 1 up, or nothing for auto", severity="error")
            return
        self._close()
        self.answer({self._asked_for: int(text) if text else None})
