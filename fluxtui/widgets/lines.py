"""A widget that draws lines of spans and repaints only the lines that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from fluxtrain.telemetry.printable import printable
from fluxtui.themes import PLAIN, Palette
from fluxtui.widgets.spans import BLANK, Line, differing, fitted


class Lines(Widget):
    """Lines at fixed rows. `show` replaces them; equal lines are neither rebuilt nor repainted."""

    DEFAULT_CSS = "Lines { width: 1fr; height: 1fr; }"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lines: list[Line] = []
        self._strips: dict[int, Strip] = {}
        self._width = 0
        self._palette: Palette = PLAIN

    def show(self, lines: Sequence[Line], palette: Palette) -> int:
        """Draw `lines` from the top; returns how many rows changed.

        Of a row only what looks different is painted: a number that changes costs a few bytes.
        """
        width, height = self.size
        new = [*lines[:height], *([BLANK] * (height - len(lines)))]
        if palette is not self._palette or width != self._width or len(new) != len(self._lines):
            changed = {y: [(0, width)] for y in range(height)}
        else:
            changed = {
                y: differing(self._lines[y], new[y], width)
                for y in range(height)
                if new[y] != self._lines[y]
            }
        self._lines, self._palette, self._width = new, palette, width
        for y in changed:
            self._strips.pop(y, None)
        parts = [Region(x, y, end - x, 1) for y, ends in changed.items() for x, end in ends]
        if parts:
            self.refresh(*parts)
        return len(changed)

    def render_line(self, y: int) -> Strip:
        """One row, from the cache unless it changed."""
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != self.size.width:
            strip = self._strip(self._lines[y] if y < len(self._lines) else BLANK)
            self._strips[y] = strip
        return strip

    def _strip(self, spans: Line) -> Strip:
        width = self.size.width
        style_of = self._palette.style
        whole = tuple((printable(text), role) for text, role in spans)
        segments = [Segment(text, style_of(role)) for text, role in fitted(whole, width)]
        return Strip(segments, width)

    @property
    def text(self) -> str:
        """What is drawn, without colours (for tests and for copying)."""
        return "\n".join("".join(text for text, _ in spans).rstrip() for spans in self._lines)
