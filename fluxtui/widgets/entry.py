"""A text field that never sends terminal codes in its text to the terminal."""

from __future__ import annotations

from rich.segment import Segment
from textual.strip import Strip
from textual.widgets import Input

from fluxtrain.events.printable import printable


class PrintableInput(Input):
    """Textual's field; paths from files, suggestions and pastes are made printable."""

    def render_line(self, y: int) -> Strip:
        """Draw one row."""
        strip = super().render_line(y)
        if all(segment.text.isprintable() for segment in strip):
            return strip
        cleaned = [Segment(printable(text), style) for text, style, _ in strip]
        return Strip(cleaned).adjust_cell_length(strip.cell_length)
