"""Transfers in both directions against their measured ceilings, and the time spent waiting."""

from __future__ import annotations

from fluxtrain.events.events import CardTraffic, StepFinished, TrafficSampled
from fluxtrain.units import UNKNOWN, bytes_text, duration_text, rate_text
from fluxtui.panels.panel import Panel, pair, share_text, stale_note, whole_share
from fluxtui.plots.bars import sparks
from fluxtui.state.view import View
from fluxtui.widgets.spans import BLANK, Line, dropped_to_fit, fitted, joined, spread, width_of

NUMBER_CELLS = 14  # a rate and an unknown ceiling
TALLEST = 4


def heading(view: View, width: int) -> Line:
    """Say if the rates are old, or are the last ones of a run that has ended."""
    if view.fresh(view.state.traffic) is None:
        return stale_note(view.age_s(view.state.traffic))
    rate = "last rate" if view.closed_in_order else "rate"
    told: list[Line] = [((f"{rate} / measured ceiling", "dim"),)]
    if view.cards > 1:
        told.insert(0, ((f"{view.cards} cards together", "dim"),))
    return dropped_to_fit(told, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw the directions, then stalls and totals; side by side if the panel is low. One line has
    the directions alone: the panel of the step shows stalls too."""
    stall = stall_line(view.state.step, view, width)
    if height <= 2:
        half = (width - 2) // 2
        down, up = (_direction(view, name, half, 1)[0] for name in ("h2d", "d2h"))
        return [(*down, ("  ", "text"), *up), stall][:height]
    names = ["h2d", "d2h", *moved_on_disk(view.state.traffic)][: height - 1]  # and the stalls
    rows = max(1, min(TALLEST, (height - 2) // len(names)))
    lines = [row for name in names for row in _direction(view, name, width, rows)]
    if len(lines) + 2 < height:
        lines.append(BLANK)
    return [*lines, stall, totals_line(view.fresh(view.state.traffic), width)][:height]


def moved_on_disk(sample: TrafficSampled | None) -> list[str]:
    """Return the directions in which the run moved bytes from or to the disk so far."""
    if sample is None:
        return []
    moved = {"disk_read": sample.disk_read_bytes, "disk_written": sample.disk_written_bytes}
    return [name for name, size_bytes in moved.items() if size_bytes]


LABELS = {"h2d": "H2D", "d2h": "D2H", "disk_read": "N R", "disk_written": "N W"}
OFF_GPU = {"h2d": "in ", "d2h": "out"}  # of the buffers, which are host memory too
ROLES = {"h2d": "device", "d2h": "host", "disk_read": "disk", "disk_written": "disk"}


def label_of(view: View, name: str) -> str:
    """Return the name of a copy direction on this machine."""
    return LABELS[name] if view.on_gpu else OFF_GPU.get(name, LABELS[name])


def rate_of(sample: TrafficSampled | CardTraffic, name: str) -> float:
    """Return the bytes per second of one direction."""
    return float(getattr(sample, f"{name}_bytes_per_s"))


def ceiling_of(sample: TrafficSampled | None, name: str) -> float | None:
    """Return the measured ceiling of a direction, None where it was not measured."""
    value = getattr(sample, f"{name}_ceiling_bytes_per_s", None)
    return float(value) if value else None


def _direction(view: View, name: str, width: int, rows: int) -> list[Line]:
    """Draw the history of a direction's rate with its newest value at the bottom."""
    sample = view.fresh(view.state.traffic)
    rate = rate_of(sample, name) if sample else None
    ceiling = ceiling_of(sample, name)
    numbers: Line = (
        (f" {rate_text(rate):>9}", "strong" if rate is not None else "dim"),
        (f" / {rate_text(ceiling)}", "dim"),
    )
    if rate is not None and ceiling:
        numbers = (*numbers, (f" {whole_share(rate / ceiling):>4}", "text"))
    role = ROLES[name]
    room = max(0, width - 4 - max(NUMBER_CELLS, width_of(numbers)))
    rates = [rate_of(old, name) for old in view.state.traffics.last(room)]
    top = ceiling or max(rates, default=0.0)
    columns = sparks(rates, room, rows, top, f"soft:{role}")
    lines = [fitted((("    ", "text"), *spans), width) for spans in columns[:-1]]
    return [*lines, spread(((f"{label_of(view, name)} ", role), *columns[-1]), numbers, width)]


def stall_line(step: StepFinished | None, view: View, width: int) -> Line:
    """Say how much of the last step was waiting, and for what."""
    current = view.fresh(step)
    if current is None:
        return dropped_to_fit([pair("stall", UNKNOWN)], width)
    waited = sum(current.stalls_s.values())
    share = waited / current.step_s if current.step_s > 0 else 0.0
    head: Line = (
        ("stall ", "dim"),
        (share_text(share), "stall" if share > 0.05 else "strong"),
        (" of step", "dim"),
    )
    causes = [
        pair(cause, duration_text(seconds), "text")
        for cause, seconds in sorted(current.stalls_s.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    return dropped_to_fit([head, *causes], width)


def totals_line(sample: TrafficSampled | None, width: int) -> Line:
    """Write the bytes moved since the start of the process."""
    moved = joined(
        [
            pair("moved", bytes_text(sample.h2d_bytes if sample else None), "text"),
            (("to device", "dim"),),
        ],
        gap=" ",
    )
    back = joined(
        [((bytes_text(sample.d2h_bytes if sample else None), "text"),), (("back", "dim"),)],
        gap=" ",
    )
    parts = [moved, back, *untrained(sample)]
    return dropped_to_fit(parts if width_of(joined(parts[:2])) <= width else [moved], width)


def untrained(sample: TrafficSampled | None) -> list[Line]:
    """Return the part of the uploads that is packed and frozen weights, if any."""
    sizes = (
        (("of it packed", sample.h2d_packed_bytes), ("frozen", sample.h2d_frozen_bytes))
        if sample
        else ()
    )
    return [pair(name, bytes_text(size), "text") for name, size in sizes if size]


PANEL = Panel(
    "bus", "Bus", body, heading, about="bytes a second in both directions, and stalls",
    title_off_gpu="Copies",
)  # fmt: skip
