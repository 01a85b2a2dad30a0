"""Changed parts of the screen as bytes for the terminal: no more cells than changed.

Textual's own update draws each part from the left edge of its widget on, which is most of a line
where one number at its end has changed.
"""

from __future__ import annotations

import re

from rich.color import ColorSystem
from rich.console import Console
from textual._compositor import ChopsUpdate
from textual.strip import Strip

from fluxtui.widgets.strips import part_of

_RESET_BEFORE_SET = re.compile(r"\x1b\[0m\x1b\[(?=[\d;]+m)")


class PartsUpdate(ChopsUpdate):
    """The same update, cut on both sides.

    `chops` are the strips of each row by their first cell, `chop_ends` where each ends, `spans`
    the parts that changed as (row, first cell, end).
    """

    @classmethod
    def of(cls, update: ChopsUpdate) -> PartsUpdate:
        """What `update` draws."""
        return cls(update.chops, update.spans, update.chop_ends)

    def render_segments(self, console: Console) -> str:
        """Text and sequences to write to the terminal."""
        written: list[str] = []
        colours = console._color_system or ColorSystem.TRUECOLOR
        for y, start, stop in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                left, right = max(x, start), min(end, stop)
                if strip is None or left >= right:
                    continue
                written.append(f"\x1b[{y + 1};{left + 1}H")
                written += [
                    text if style is None else Strip.render_style(style, text, colours)
                    for text, style, _ in part_of(strip, left - x, right - x)
                ]
        return "".join(written)


def shorter(text: str) -> str:
    """The same look in fewer bytes: a style that is taken off and the next are one sequence."""
    return _RESET_BEFORE_SET.sub("\x1b[0;", text)
