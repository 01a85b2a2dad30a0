"""Bars and sparklines as spans. Lengths are cells; parts of a bar always sum to its width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fluxtrain.units import UNKNOWN
from fluxtui.widgets.spans import Line, Span, spread

LEVELS = "▁▂▃▄▅▆▇█"
TRACE = 0.002
NOTE_CELLS = 13


@dataclass(frozen=True, slots=True)
class BarPart:
    """A share of a whole. The letter stands in for the label where that does not fit."""

    label: str
    letter: str
    value: float
    role: str


def gauge(share: float | None, width: int, role: str, rest: str = "track") -> Line:
    """Draw how much of something is used, as a thin line with half-cell resolution."""
    if width <= 0:
        return ()
    if share is None or math.isnan(share):
        return (("╌" * width, rest),)
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    full, half = divmod(halves, 2)
    spans: list[Span] = []
    if full:
        spans.append(("━" * full, role))
    if half:
        spans.append(("╸", role))
    if width - full - half:
        spans.append(("─" * (width - full - half), rest))
    return tuple(spans)


def meter(label: str, share: float | None, note: str, role: str, width: int) -> Line:
    """Draw a name, a gauge, its share in percent and a note, in one line."""
    percent = f"{share * 100:3.0f}%" if share is not None else f"{UNKNOWN:>4}"
    right: Line = (
        (f" {percent}", "strong" if share is not None else "dim"),
        (f"  {note:>{NOTE_CELLS}}", "dim"),
    )
    room = width - len(label) - 1 - sum(len(text) for text, _ in right)
    return spread(((f"{label} ", "dim"), *gauge(share, room, role)), right, width)


def cells_of(values: Sequence[float], width: int) -> list[int]:
    """Return whole cells in proportion to `values`, summing to `width` (largest remainder).

    A small share still gets a cell, so that it can be seen; a trace (under 0.2 %) does not.
    """
    values = [value if 0 < value < math.inf else 0.0 for value in values]
    total = sum(values)
    if not 0 < total < math.inf or width <= 0:
        return [0] * len(values)
    exact = [value / total * width for value in values]
    cells = [int(share) for share in exact]
    by_rest = sorted(range(len(values)), key=lambda i: exact[i] - cells[i], reverse=True)
    for i in by_rest[: width - sum(cells)]:
        cells[i] += 1
    for i, value in enumerate(values):
        widest = max(range(len(cells)), key=cells.__getitem__)
        if value > total * TRACE and cells[i] == 0 and cells[widest] > 1:
            cells[i], cells[widest] = 1, cells[widest] - 1
    return cells


def partition(parts: Sequence[BarPart], width: int) -> Line:
    """Draw a bar cut in proportion, with each part's label (or letter) inside it."""
    spans: list[Span] = []
    for part, cells in zip(parts, cells_of([p.value for p in parts], width), strict=True):
        if cells <= 0:
            continue
        edge = "▏" if spans else " "  # seen without colours too
        label = f"{edge}{part.label}"
        if len(label) > cells:
            label = part.letter if cells == 1 else f"{edge}{part.letter}"
        spans.append((label[:cells].ljust(cells), f"on:{part.role}"))
    return tuple(spans) if spans else (("╌" * width, "track"),)


def sparks(
    values: Sequence[float | None], width: int, rows: int, top: float, role: str
) -> list[Line]:
    """Draw the newest `width` values as columns against `top`, `rows` high; gaps where unknown."""
    recent = list(values)[-width:] if width > 0 else []
    lines: list[Line] = []
    for row in reversed(range(rows)):
        columns = "".join(_cell(value, top, row, rows) for value in recent)
        rest = ("·" if row == 0 else " ") * (max(0, width) - len(recent))
        lines.append(((rest, "faint"), (columns, role)))
    return lines


def _cell(value: float | None, top: float, row: int, rows: int) -> str:
    """Draw one row of a value's column, row 0 the lowest; zero keeps a thin foot."""
    if value is None:
        return " "
    eighths = max(0.0, min(1.0, value / top)) * rows * 8 if 0 < top < math.inf else 0.0
    inside = round(eighths) - row * 8
    if row == 0:
        inside = max(1, inside)
    return " " if inside <= 0 else LEVELS[min(8, inside) - 1]
