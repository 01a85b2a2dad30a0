"""Where the time of the last step went: a bar that partitions it."""

from __future__ import annotations

import math

from fluxtrain.events.events import StepFinished
from fluxtrain.units import UNKNOWN, duration_text
from fluxtui.panels.bus import stall_line
from fluxtui.panels.panel import Panel, pair, stale_note
from fluxtui.plots.bars import BarPart, partition
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, line

ROLES = {"data": "data", "forward": "forward", "backward": "backward", "optimizer": "update"}
LETTERS = {"data": "D", "forward": "F", "backward": "B", "optimizer": "O", "other": "…"}


def heading(view: View, width: int) -> Line:
    """Say which step is shown, and how long it took."""
    step = view.fresh(view.state.step)
    if step is None:
        return stale_note(view.age_s(view.state.step))
    return dropped_to_fit(
        [
            ((f"{step.step}", "text"),),
            ((duration_text(step.step_s), "strong"),),
            stall_line(step, view, 48),
        ],
        width,
    )


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw the bar, then its legend."""
    parts = phase_parts(view)
    if not parts:
        note = UNKNOWN if view.state.step else "no step so far"
        return [line(("╌" * width, "track")), line((note, "dim"))][:height]
    lines = [partition(parts, width)]
    if height >= 2:
        whole = sum(part.value for part in parts)
        legend = [
            (
                (f" {part.letter} ", f"on:{part.role}"),
                *pair(f" {part.label.split()[0]}", duration_text(part.value)),
                (f" {part.value / whole * 100:.0f}%", "dim"),
            )
            for part in parts
        ]
        lines.append(dropped_to_fit(legend, width, gap="  "))
    return lines[:height]


def phase_parts(view: View) -> list[BarPart]:
    """Return the phases of the last step; none if that is too old."""
    step = view.fresh(view.state.step)
    return parts_of(step) if step is not None else []


def parts_of(step: StepFinished) -> list[BarPart]:
    """Return the phases in the order of time; the rest of the step is "other"."""
    parts = [
        BarPart(name, LETTERS.get(name, name[:1].upper()), seconds, ROLES.get(name, "other"))
        for name, seconds in step.phases_s.items()
        if 0 < seconds < math.inf
    ]
    rest = step.step_s - sum(part.value for part in parts)
    if rest > 0.005 * step.step_s:
        parts.append(BarPart("other", LETTERS["other"], rest, "other"))
    return parts


PANEL = Panel("step", "Step", body, heading, about="where the time of the last step went")
