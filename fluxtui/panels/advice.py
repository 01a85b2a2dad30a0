"""Advice with its measured cause, the predicted gain and the setting to change."""

from __future__ import annotations

from fluxtrain.telemetry.events import AdviceGiven
from fluxtui.panels.panel import Panel
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, wrapped


def body(view: View, width: int, height: int) -> list[Line]:
    """Newest first, wrapped."""
    lines: list[Line] = []
    for given in reversed(view.state.advice):
        lines.extend(rows(given, width))
    return lines[:height] or [((" none so far", "dim"),)]


def rows(given: AdviceGiven, width: int) -> list[Line]:
    """One piece of advice: the text, then gain and setting."""
    lines: list[Line] = []
    for i, part in enumerate(wrapped(given.text, width - 2)):
        lines.append((("▲ " if i == 0 else "  ", "accent"), (part, "text")))
    note = " · ".join(part for part in (given.gain, given.how) if part)
    lines.extend((("  ", "text"), (part, "good")) for part in wrapped(note, width - 2))
    return lines


PANEL = Panel("advice", "Advice", body, about="what would make this run faster, and by how much")
