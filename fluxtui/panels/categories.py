"""Each category of device memory: now, its share, and the most that was seen."""

from __future__ import annotations

from fluxtrain.events.events import MemorySampled
from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.memory import CATEGORIES, LETTERS, UNTRAINED
from fluxtui.panels.panel import Panel, share_text
from fluxtui.state.view import View
from fluxtui.widgets.spans import BLANK, Line, dropped_to_fit, fitted


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw a line for each category, then the host's."""
    sample = view.fresh(view.state.memory)
    return [*_device_rows(view, sample, width), BLANK, *_host_rows(sample, width)][:height]


def _device_rows(view: View, sample: MemorySampled | None, width: int) -> list[Line]:
    used = sample.device_used_bytes if sample else None
    seen = list(view.state.memories)
    rows = [_row("", "", ("", "now", "share", "most"), width)]
    for name in CATEGORIES:
        now = sample.device_by.get(name) if sample else None
        if name in UNTRAINED and not (now or any(old.device_by.get(name) for old in seen)):
            continue
        share = now / used if now is not None and used else None
        most = max((old.device_by.get(name, 0) for old in seen), default=None)
        texts = (name, bytes_text(now), share_text(share), bytes_text(most))
        rows.append(_row(LETTERS[name], name, texts, width))
    peak = sample.device_peak_bytes if sample else None
    rows.append(_row("", "", ("all of it", bytes_text(used), "", bytes_text(peak)), width))
    return rows


def _host_rows(sample: MemorySampled | None, width: int) -> list[Line]:
    if sample is None:
        return [_row("C", "host", ("resident set", UNKNOWN, "", UNKNOWN), width)]
    peak = bytes_text(sample.host_peak_bytes)
    rows = (
        ("resident set", bytes_text(sample.host_rss_bytes), "", peak),
        ("arenas", bytes_text(sample.host_arena_bytes), "", ""),
        ("page-locked", bytes_text(sample.host_pinned_bytes), "", ""),
        ("limit", bytes_text(sample.host_limit_bytes), "", ""),
    )
    disk = ("frozen weights", bytes_text(sample.disk_bytes), "", "")
    on_disk = [_row("N", "disk", disk, width)] if sample.disk_bytes else []
    return [*(_row("C", "host", texts, width) for texts in rows), *on_disk]


def _row(letter: str, role: str, texts: tuple[str, str, str, str], width: int) -> Line:
    """Write label, now, share, most; columns are dropped from the right where the panel
    is narrow."""
    label, now, share, most = texts
    mark: Line = ((f" {letter} ", f"on:{role}"),) if letter else (("   ", "text"),)
    value = "dim" if now in (UNKNOWN, "now") else "strong"
    columns: list[Line] = [
        (*mark, (f" {label:<13}", "text"), (f"{now:>8}", value)),
        ((f"{share:>6}", "dim"),),
        ((f"{most:>8}", "dim" if most == "most" else "text"),),
    ]
    return fitted(dropped_to_fit(columns, width, gap=" "), width)


PANEL = Panel("categories", "By category", body, about="each category now and at its most")
