"""The latest transfers that the engine made, newest first."""

from __future__ import annotations

from fluxtrain.events.events import Move
from fluxtrain.units import UNKNOWN, bytes_text, duration_text
from fluxtui.panels.panel import Panel, stale_note
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, cut_in_front, dropped_to_fit

ARROWS = {"C>G": "C→G", "G>C": "G→C", "C>N": "C→N", "N>C": "N→C", "N>G": "N→G"}
ROLES = {"C>G": "device", "G>C": "host", "C>N": "disk", "N>C": "host", "N>G": "device"}


def heading(view: View, width: int) -> Line:
    """Say how many transfers there are a minute."""
    if view.fresh(view.state.made) is None:
        return stale_note(view.age_s(view.state.made))
    rate = view.state.moves_per_minute
    text = UNKNOWN if rate is None else f"{rate:.0f}"
    parts: list[Line] = [((text, "strong"), (" a minute", "dim"))]
    if view.state.moves_are_a_sample:
        parts.append((("a sample of them", "dim"),))
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw one transfer a line."""
    moves = view.state.moves.last(height)
    if not moves:
        return [((" no transfer so far", "dim"),)]
    return [row(move, width) for move in reversed(moves)]


def row(move: Move, width: int) -> Line:
    """Show step, block, direction, bytes, time, content and cause; the last columns if they fit."""
    role = ROLES.get(move.direction, "text")
    name_cells = max(8, min(22, width - (48 if width >= 60 else 27)))
    name = short_name(move.block, name_cells)
    return dropped_to_fit(
        [
            ((f"{move.step:>5}", "dim"), (f" {name:<{name_cells}}", "text")),
            ((ARROWS.get(move.direction, move.direction), role),),
            ((f"{bytes_text(move.bytes):>8}", "text"),),
            ((f"{duration_text(move.duration_s):>7}", "dim"),),
            ((f"{move.what:<11}", "dim"),),
            ((move.cause, "dim"),),
        ],
        width,
        gap=" ",
    )


def short_name(name: str, cells: int) -> str:
    """Return the end of a dotted name: whole parts if they fit, else cut in front."""
    while len(name) > cells and "." in name:
        name = name.split(".", 1)[1]
    return cut_in_front(name, cells)


PANEL = Panel("moves", "Moves", body, heading, about="transfers that the engine made, newest first")
