"""Device memory over time against the plan and the budget, and the host's resident set."""

from __future__ import annotations

from fluxtrain.units import bytes_text
from fluxtui.panels.panel import Panel
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit
from fluxtui.widgets.timeline import Track, timeline

NOTHING: list[Line] = [((" no sample so far", "dim"),)]


def heading(view: View, width: int) -> Line:
    """Which line is which."""
    return dropped_to_fit(
        [
            (("⠒", "smooth"), (" device", "text")),
            (("⠒", "workspace"), (" host", "text")),
            (("╌", "evaluation"), (" plan of the device", "dim")),
        ],
        width,
    )


def body(view: View, width: int, height: int) -> list[Line]:
    """Device above host where there is room, else the device alone."""
    samples = list(view.state.memories)
    if len(samples) < 2:
        return NOTHING
    times = [sample.wall_s for sample in samples]
    planned = view.state.planned.device_bytes if view.state.planned else None
    used = Track([sample.device_used_bytes for sample in samples], "smooth")
    host = Track([sample.host_rss_bytes for sample in samples], "workspace")
    upper = height - height // 2 if height >= 10 else height
    lines = timeline(times, [used], width, upper, bytes_text, planned, 1024.0)
    if height > upper:
        lines += timeline(times, [host], width, height - upper, bytes_text, thousand=1024.0)
    return lines


PANEL = Panel(
    "memory_history", "Over time", body, heading, about="memory of device and host over time"
)
