"""Device memory by category and the host's over time, each against its plan."""

from __future__ import annotations

from fluxtrain.units import bytes_text
from fluxtui.panels.memory import CATEGORIES, LETTERS
from fluxtui.panels.panel import Panel
from fluxtui.plots.stack import Layer, stacked
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit

NOTHING: list[Line] = [((" no sample so far", "dim"),)]
TWO_FROM_ROWS = 10


def heading(view: View, width: int) -> Line:
    """Draw the legend of the colours, and of the dashes for the plan."""
    newest = view.state.memories.newest
    shown = [name for name in CATEGORIES if newest and newest.device_by.get(name)]
    categories = [((LETTERS[name], f"on:{name}"), (f" {name}", "dim")) for name in shown]
    return dropped_to_fit([(("╌", "evaluation"), (" plan", "dim")), *categories], width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw device above host where both have room, else the device alone."""
    samples = list(view.state.memories)
    if len(samples) < 2:
        return NOTHING[:height]
    times = [sample.wall_s for sample in samples]
    planned = view.state.planned
    known = [name for name in CATEGORIES if any(sample.device_by.get(name) for sample in samples)]
    device = [
        Layer([float(s.device_by.get(name, 0)) for s in samples], name, LETTERS[name])
        for name in known
    ]
    arenas = [float(min(s.host_arena_bytes, s.host_rss_bytes or 0)) for s in samples]
    rest = [float(s.host_rss_bytes or 0) - a for s, a in zip(samples, arenas, strict=True)]
    upper = height - height // 2 if height >= TWO_FROM_ROWS else height
    limit = planned.device_bytes if planned else None
    lines = stacked(times, device, width, upper, bytes_text, limit)
    if height > upper:
        host = [Layer(arenas, "host", "C"), Layer(rest, "other", "P")]
        limit = planned.host_bytes if planned else None
        parts: list[Line] = [
            ((" host", "title"),),
            (("C", "on:host"), (" arenas", "dim")),
            (("P", "on:other"), (" the rest", "dim")),
            ((" of the process", "dim"),),
        ]
        lines.append((*dropped_to_fit(parts[:3], width), *dropped_to_fit(parts[3:], width - 29)))
        lines += stacked(times, host, width, height - upper - 1, bytes_text, limit)
    return lines[:height]


PANEL = Panel(
    "memory_history",
    "Over time",
    body,
    heading,
    about="memory by category over time and the plan",
    shows=lambda view: (view.state.memories, view.state.planned),
)
