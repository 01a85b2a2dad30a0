"""Stacked layers over wall clock time: the parts of a whole, and how they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fluxtui.plots.bars import LEVELS
from fluxtui.plots.braille import PlotWindow
from fluxtui.plots.timeline import AXIS_CELLS, ages, axis_labels
from fluxtui.state.history import drawable
from fluxtui.widgets.spans import Line, Span

LETTER_EVERY = 12  # columns between two letters of a layer


@dataclass(frozen=True, slots=True)
class Layer:
    """Values at the times of the chart; the letter identifies the layer without colours."""

    values: Sequence[float]
    role: str
    letter: str


def stacked(
    times: Sequence[float],
    layers: Sequence[Layer],
    width: int,
    height: int,
    write: Callable[[float | None], str],
    mark: float | None = None,
) -> list[Line]:
    """Draw `height` lines, the first layer lowest; `mark` is a level drawn across empty cells.

    Of samples that share a column the one with the largest sum is drawn, so a peak is shown.
    """
    room, rows = width - AXIS_CELLS - 1, height - 1
    if room < LETTER_EVERY or rows < 2 or len(times) < 2:
        return []
    mark = mark if drawable(mark) else None
    columns = _columns(times, layers, room)
    top = max([sum(column) for column in columns], default=0.0)
    top = max(top, mark or 0.0) * 1.05 or 1.0
    marked = None if mark is None else rows - 1 - min(rows - 1, int(mark / top * rows))
    labels = axis_labels(PlotWindow(min(times), max(times), 0.0, top), rows, write, 1024.0)
    lines: list[Line] = []
    for row in range(rows):
        cells = [
            _cell(column, layers, rows - 1 - row, rows, top, at)
            for at, column in enumerate(columns)
        ]
        if row == marked:
            cells = [_marked(cell) for cell in cells]
        edge: Span = ("┤" if row in labels else "│", "faint")
        label: Span = (f"{labels.get(row, ''):>{AXIS_CELLS - 1}} ", "axis")
        lines.append((label, edge, *_joined(cells)))
    return [*lines, ages(max(times) - min(times), width)]


def _columns(times: Sequence[float], layers: Sequence[Layer], room: int) -> list[tuple[float, ...]]:
    """Return the values of each column; one without a sample repeats the one before it. Times are
    out of order if the clock was set back."""
    first = min(times)
    span = max(times) - first or 1.0
    found: list[tuple[float, ...] | None] = [None] * room
    for i, at in enumerate(times):
        column = min(room - 1, int((at - first) / span * room))
        values = tuple(
            max(0.0, layer.values[i]) if drawable(layer.values[i]) else 0.0 for layer in layers
        )
        present = found[column]
        if present is None or sum(values) > sum(present):
            found[column] = values
    filled: list[tuple[float, ...]] = []
    for here in found:
        filled.append(here if here is not None else filled[-1])
    return filled


def _cell(
    column: tuple[float, ...], layers: Sequence[Layer], row: int, rows: int, top: float, at: int
) -> Span:
    """Draw one cell: the layer at its middle, or the part of it that the highest layer fills."""
    low, high = row * top / rows, (row + 1) * top / rows
    total = sum(column)
    if total <= low:
        return (" ", "text")
    if total < high:
        eighths = round((total - low) / (high - low) * 8)
        highest = max(i for i, value in enumerate(column) if value > 0)
        return (LEVELS[max(1, eighths) - 1], layers[highest].role)
    middle, floor = (low + high) / 2, 0.0
    for layer, value in zip(layers, column, strict=True):
        if floor <= middle < floor + value:
            central = abs((floor + value / 2) - middle) <= (high - low) / 2
            letter = layer.letter if central and at % LETTER_EVERY == LETTER_EVERY // 2 else " "
            return (letter, f"on:{layer.role}")
        floor += value
    return (" ", "text")


def _marked(cell: Span) -> Span:
    """Draw a dash of the mark: in its own colour on empty cells, in the layer's on others."""
    text, role = cell
    if role.startswith("on:"):
        return ("╌", role) if text == " " else cell
    return ("╌", "evaluation") if text == " " else cell


def _joined(cells: Sequence[Span]) -> Line:
    spans: list[Span] = []
    for text, role in cells:
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + text, role)
        else:
            spans.append((text, role))
    return tuple(spans)
