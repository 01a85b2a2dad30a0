"""Frames of panels as lines: a box, or a titled rule, or nothing around the body."""

from __future__ import annotations

from fluxtui.panels.panel import Panel
from fluxtui.screens.arrangement import Frame
from fluxtui.state.view import View
from fluxtui.widgets.spans import BLANK, Line, fitted, width_of


def framed(
    panel: Panel, view: View, width: int, height: int, frame: Frame, focused: bool = False
) -> list[Line]:
    """Draw the panel in exactly `width` x `height` cells."""
    edge = "accent" if focused else "faint"
    if frame == "bare":
        return _filled(panel.body(view, width, height), width, height)
    if frame == "rule":
        top = _title_line(panel, view, width, ("─ ", "─"), edge)
        return [top, *_filled(panel.body(view, width, height - 1), width, height - 1)]
    top = _title_line(panel, view, width, ("╭─ ", "╮"), edge)
    inner = _filled(panel.body(view, width - 4, height - 2), width - 4, height - 2)
    sides = [(("│ ", edge), *spans, (" │", edge)) for spans in inner]
    return [top, *sides, (("╰" + "─" * (width - 2) + "╯", edge),)]


def _title_line(panel: Panel, view: View, width: int, ends: tuple[str, str], edge: str) -> Line:
    start, end = ends
    title: Line = ((start, edge), (panel.title_in(view), "accent" if edge == "accent" else "title"))
    room = width - width_of(title) - len(end) - 4
    heading = panel.heading(view, room)
    if heading:
        title = (*title, ("  ", "text"), *heading)
    title = (*title, (" ", "text"))
    rest = width - width_of(title) - len(end)
    return fitted((*title, ("─" * max(0, rest) + end, edge)), width)


def _filled(lines: list[Line], width: int, height: int) -> list[Line]:
    rows = [fitted(spans, width) for spans in lines[:height]]
    return rows + [fitted(BLANK, width)] * (height - len(rows))
