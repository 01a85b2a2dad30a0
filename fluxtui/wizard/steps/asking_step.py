"""A page with one field that a key opens for a number or a text, and Escape closes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import on
from textual.widgets import Input

from fluxtui.widgets.entry import Entry
from fluxtui.wizard.steps.step import Step

NUMBER = r"\d{0,9}"


class AskingStep(Step):
    """Its keys ask for answers one at a time.

    Attributes:
        ASKED: the title of each field of the answers that can be asked for.
        TEXTS: those of them that are no numbers.
    """

    DEFAULT_CSS = """
    AskingStep Input {
        display: none; height: 3; width: 46; border: round $accent; background: transparent;
    }
    """
    ASKED: ClassVar[Mapping[str, str]] = {}
    TEXTS: ClassVar[tuple[str, ...]] = ()
    _asked_for = ""

    def make_box(self) -> Input:
        """Make the field, which stands first on the page."""
        return Entry(placeholder="auto", id="number-input")

    def take_focus(self) -> None:
        """Focus the page itself, so that its keys work."""
        self.focus()

    def leave(self) -> bool:
        """Escape closes the field and keeps what was set before."""
        was_open = bool(self._box.display)
        self._close()
        return was_open

    @property
    def asks_for_a_number(self) -> bool:
        """Whether the input is open."""
        return bool(self._box.display)

    def action_number(self, field: str) -> None:
        """Open the field for a number, or a text."""
        value, box = getattr(self.view.answers, field), self._box
        self._asked_for = field
        box.restrict = None if field in self.TEXTS else NUMBER
        box.value = "" if value is None else str(value)
        box.border_title = f"{self.ASKED[field]}; empty: auto"
        box.display = True
        box.focus()

    @property
    def _box(self) -> Input:
        return self.query_one("#number-input", Input)

    def _close(self) -> None:
        self._box.display = False
        self.focus()

    @on(Input.Submitted, "#number-input")
    def _given(self, event: Input.Submitted) -> None:
        event.stop()
        text, field = event.value.strip(), self._asked_for
        if field in self.TEXTS:
            self._close()
            self.answer({field: text})
            return
        if text and int(text) < 1:
            self.notify("a whole number from 1 up, or nothing for auto", severity="error")
            return
        self._close()
        self.answer({field: int(text) if text else None})
