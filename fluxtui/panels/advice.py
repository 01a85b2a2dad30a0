"""Advice with its measured cause and predicted gain, and the outcome of the newest change."""

from __future__ import annotations

from fluxtrain.events.events import AdviceGiven
from fluxtui.panels.panel import Panel
from fluxtui.panels.trials import asked_line, no_advice, promise, trial_line
from fluxtui.state.changes import ranked
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, wrapped


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw the change under way, then advice, the best first."""
    newest = view.state.changes.newest
    changed = [line for line in (asked_line(view), newest and trial_line(newest)) if line]
    lines: list[Line] = [((" ", "text"), *line) for line in changed]
    for given in ranked(view.state.advice):
        lines.extend(rows(view, given, width))
    return lines[:height] or [((f" {no_advice(view)}", "dim"),)]


def rows(view: View, given: AdviceGiven, width: int, mark: str = "▲") -> list[Line]:
    """Return a piece of advice as rows: its predicted gain, then the reason, wrapped."""
    lines: list[Line] = [((f"{mark} ", "accent"), *promise(view, given))]
    return lines + [(("  ", "text"), (part, "dim")) for part in wrapped(given.text, width - 2)]


PANEL = Panel("advice", "Advice", body, about="what would make this run faster, and by how much")
