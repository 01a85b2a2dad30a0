"""The last steps one by one, newest first: each a bar as long as it took, cut by phase."""

from __future__ import annotations

import math

from fluxtrain.events.events import StepFinished
from fluxtrain.units import duration_text, loss_text
from fluxtui.panels.panel import Panel
from fluxtui.panels.step import LETTERS, parts_of
from fluxtui.panels.step import ROLES as PHASE_ROLES
from fluxtui.plots.bars import BarPart, partition
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, fitted

TEXT_CELLS = 25


def heading(view: View, width: int) -> Line:
    """Return the legend of the phases, and the selected step if it is not the newest."""
    if view.chart.last_step is not None:
        return dropped_to_fit([((f"up to step {view.chart.last_step}", "warn"),)], width)
    legend: Line = tuple(
        span
        for name, role in PHASE_ROLES.items()
        for span in ((f" {LETTERS[name]} ", f"on:{role}"), (f" {name}  ", "dim"))
    )
    return dropped_to_fit([legend[:-1], legend[-1:]], width, gap="")


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw bars on one scale: the slowest step on screen fills the width."""
    steps = view.state.steps.last(height)
    if view.chart.last_step is not None:
        steps = [step for step in view.state.steps if step.step <= view.chart.last_step][-height:]
    if not steps:
        return [((" no step so far", "dim"),)]
    slowest_s = max((step.step_s for step in steps if step.step_s < math.inf), default=0.0)
    return [_row(step, slowest_s, width) for step in reversed(steps)]


def _row(step: StepFinished, slowest_s: float, width: int) -> Line:
    room = max(0, width - TEXT_CELLS)
    known = 0 < step.step_s <= slowest_s
    cells = max(1, round(room * (step.step_s / slowest_s))) if known else 0
    parts = [BarPart(part.letter, part.letter, part.value, part.role) for part in parts_of(step)]
    text: Line = (
        (f"{step.step:>6}", "dim"),
        (f"{duration_text(step.step_s):>9}", "strong"),
        (f"{loss_text(step.loss):>8}  ", "text"),
    )
    return fitted((*text, *partition(parts, min(cells, room))), width)


PANEL = Panel(
    "recent_steps", "Last steps", body, heading, about="the last steps, each cut by phase"
)
