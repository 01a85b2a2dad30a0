"""Device memory by category against the plan and the budget, and the host's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fluxtrain.events.events import MemorySampled
from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.panel import Panel, pair, share_text, stale_note
from fluxtui.plots.bars import BarPart, partition
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit

CATEGORIES = (
    "weights", "frozen", "packed", "unpacked", "gradients", "optimizer", "activations", "workspace",
    "cache",
)  # fmt: skip
UNTRAINED = ("frozen", "packed", "unpacked")  # of methods that train adapters alone
LETTERS = {
    "weights": "W", "frozen": "F", "packed": "P", "unpacked": "U", "gradients": "G",
    "optimizer": "O", "activations": "A", "workspace": "S", "cache": "K",
}  # fmt: skip


def device_name(view: View) -> str:
    """Return the device's name; in a CPU run it is a buffer in host memory, and says so."""
    hello = view.state.hello
    if hello is None:
        return "device"
    if hello.device == "cpu":
        return "in host memory" if view.cards == 1 else f"{view.devices}, in host memory"
    return view.devices


def heading(view: View, width: int) -> Line:
    """Return used and available memory, the peak, and the plan with its deviation."""
    sample = view.fresh(view.state.memory)
    planned = view.state.planned.device_bytes if view.state.planned else None
    if sample is None:
        note = stale_note(view.age_s(view.state.memory))
        return dropped_to_fit([((device_name(view), "dim"),), ((UNKNOWN, "dim"),), note], width)
    limit = sample.device_budget_bytes or sample.device_total_bytes
    used: Line = ((bytes_text(sample.device_used_bytes), "strong"),)
    if limit:
        used = (*used, (f" of {bytes_text(limit)}", "dim"))
    parts = [used, pair("peak", bytes_text(sample.device_peak_bytes), "text")]
    parts.append((*pair("plan", bytes_text(planned), "text"), *_agreement(sample, planned)))
    return dropped_to_fit([*parts, ((device_name(view), "dim"),)], width)


def _agreement(sample: MemorySampled, planned: int | None) -> Line:
    peak = sample.device_peak_bytes
    if not planned or not peak:
        return ()
    off = peak / planned - 1.0
    if off > 0.02:
        return ((f" peak over by {share_text(off)}", "warn"),)
    return ((" ✓", "good"),)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw the bar, then (if there is room) its legend and the host's line."""
    sample = view.fresh(view.state.memory)
    if sample is None:
        return [(("╌" * width, "track"),)]
    parts = parts_of(sample, view.state.planned.device_bytes if view.state.planned else None)
    lines = [partition(parts, width)]
    if height >= 2:
        lines.append(legend_line(parts, width))
    if height >= 3:
        lines.append(host_line(view, sample, width))
    return lines[:height]


def legend_line(parts: Sequence[BarPart], width: int) -> Line:
    """Return the letters of a bar with the categories and their bytes."""
    legend = [
        (
            (f" {part.letter} ", f"on:{part.role}"),
            *pair(f" {part.label}", bytes_text(part.value), "text"),
        )
        for part in parts
        if part.letter and part.value > 0
    ]
    return dropped_to_fit(legend, width, gap="  ")


def category_parts(by: Mapping[str, int]) -> list[BarPart]:
    """Return the categories in a fixed order; bytes of no category come last."""
    rest = sum(value for name, value in by.items() if name not in CATEGORIES)
    parts = [BarPart(name, LETTERS[name], float(by.get(name, 0)), name) for name in CATEGORIES]
    return [*parts, BarPart("other", "?", float(rest), "other")] if rest else parts


def parts_of(sample: MemorySampled, planned: int | None) -> list[BarPart]:
    """Return categories in a fixed order, then the free part of the budget (or plan, or peak)."""
    parts = category_parts(sample.device_by)
    used = sum(part.value for part in parts)
    limit = sample.device_budget_bytes or sample.device_total_bytes
    whole = limit or planned or sample.device_peak_bytes or 0
    if whole > used:
        label = "free" if limit else "left of the plan" if planned else "below the peak"
        parts.append(BarPart(label, "", whole - used, "free"))
    return parts


def host_line(view: View, sample: MemorySampled, width: int) -> Line:
    """Draw the trainer's own memory: resident set, its peak, arenas, page-locked bytes."""
    host: Line = pair("host", bytes_text(sample.host_rss_bytes))
    if sample.host_limit_bytes:
        host = (*host, (f" of {bytes_text(sample.host_limit_bytes)}", "dim"))
    planned = view.state.planned.host_bytes if view.state.planned else None
    return dropped_to_fit(
        [
            host,
            pair("peak", bytes_text(sample.host_peak_bytes), "text"),
            pair("plan", bytes_text(planned), "text"),
            pair("arenas", bytes_text(sample.host_arena_bytes), "text"),
            pair("page-locked", bytes_text(sample.host_pinned_bytes), "text"),
            *([pair("on disk", bytes_text(sample.disk_bytes))] if sample.disk_bytes else []),
        ],
        width,
        gap="  ",
    )


PANEL = Panel(
    "memory", "Device memory", body, heading, about="device memory by category against the plan",
    title_off_gpu="Buffers",
)  # fmt: skip
