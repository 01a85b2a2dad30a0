"""Sends changed parts of the screen to the terminal: no more cells than changed.

Textual's own update draws each part from the left edge of its widget on, which is most of a line
if one number at its end has changed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from rich.color import ColorSystem
from rich.console import Console
from textual._compositor import ChopsUpdate
from textual.strip import Strip

from fluxtui.widgets.lines import part_of

_STYLES = re.compile(r"\x1b\[0m\x1b\[(?P<next>[\d;]+)m|\x1b\[(?P<set>[\d;]+)m")
_PARAMETER = re.compile(r"[34]8;2;\d+;\d+;\d+|[34]8;5;\d+|\d+")


class PartsUpdate(ChopsUpdate):
    """An update of Textual's, cut on both sides to the changed cells.

    `chops` are the strips of each row by their first cell, `chop_ends` where each ends, `spans`
    the parts that changed as (row, first cell, end).
    """

    @classmethod
    def of(cls, update: ChopsUpdate) -> PartsUpdate:
        """Make one from Textual's `update`."""
        return cls(update.chops, update.spans, update.chop_ends)

    def render_segments(self, console: Console) -> str:
        """Return text and sequences to write to the terminal."""
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
    """Shorten text with styles: for each style write only the difference from the one before.

    Textual resets each style and writes the next one whole; neighbours often share colours. No
    style is active before the text.
    """
    now = ""

    def told(found: re.Match[str]) -> str:
        nonlocal now
        before, now = now, found["set"] or found["next"]
        if found["set"] is not None:
            now = "" if now == "0" else now
            return found[0]
        return _change(before, now)

    return _STYLES.sub(told, text)


@lru_cache(maxsize=4096)
def _change(before: str, after: str) -> str:
    """Return the sequence that turns one style into another, by their parameters."""
    old, new = _Style.of(before), _Style.of(after)
    if not old.attributes <= new.attributes:  # terminals differ in how they reset a single one
        return f"\x1b[0;{after}m"
    found = [name for name in after.split(";") if name in new.attributes - old.attributes]
    if new.colour != old.colour:
        found.append(new.colour or "39")
    if new.ground != old.ground:
        found.append(new.ground or "49")
    return f"\x1b[{';'.join(found)}m" if found else ""


class _Style(NamedTuple):
    """Parameters of a sequence by what they set."""

    attributes: frozenset[str]
    colour: str
    ground: str

    @classmethod
    def of(cls, parameters: str) -> _Style:
        """Split the parameters that Rich writes into attributes, foreground and background."""
        colour = ground = ""
        attributes: set[str] = set()
        for name in _PARAMETER.findall(parameters):
            if name.startswith(("38;", "3", "9")) and len(name) > 1:
                colour = "" if name == "39" else name
            elif name.startswith(("48;", "4", "10")) and len(name) > 1:
                ground = "" if name == "49" else name
            else:
                attributes.add(name)
        return cls(frozenset(attributes), colour, ground)
