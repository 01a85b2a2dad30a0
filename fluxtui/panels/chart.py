"""Curves by step or by tokens: one or more traces behind a y axis, with a crosshair."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fluxtrain.units import count_text
from fluxtui.plots.braille import Canvas, PlotWindow, Series, rounded_ticks
from fluxtui.state.history import DRAWABLE, Bucket, drawable
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import ChartSettings
from fluxtui.widgets.spans import Line, fitted, line, wrapped

AXIS_CELLS = 7  # " 1.234 ┤"
ENOUGH = 2
Place = Callable[[int], float]  # a step to its place on the x axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One curve; where `smooth_role` is given its moving average is drawn over the raw values."""

    buckets: Sequence[Bucket]
    role: str
    smooth_role: str = ""
    marks: Sequence[tuple[int, float]] = ()  # (step, value), such as evaluations
    mark_role: str = "evaluation"
    mark: str = "×"
    dashed: bool = False
    place: Place = float


def place_of(state: FoldedRun, by_tokens: bool) -> Place:
    """Return a step's place on the x axis: its number, or the tokens trained by then."""
    buckets = state.tokens.buckets
    if not by_tokens or not buckets:
        return float
    ends = [bucket.last for bucket in buckets]
    totals = [bucket.high for bucket in buckets]

    def tokens_at(step: int) -> float:
        at = bisect_left(ends, step)
        if at >= len(ends):
            return totals[-1]
        before_step, before = (ends[at - 1], totals[at - 1]) if at else (0, 0.0)
        share = (step - before_step) / max(1, ends[at] - before_step)
        return before + (totals[at] - before) * share

    return tokens_at


def chart(traces: Sequence[Trace], settings: ChartSettings, width: int, height: int) -> list[Line]:
    """Draw `height` lines: rows of dots behind a y axis, then the x axis with its numbers.

    The first trace decides what a zoom shows; the others are drawn where they overlap with it.
    """
    main = traces[0]
    if len(main.buckets) < ENOUGH or width < AXIS_CELLS + 8 or height < 3:
        note = "the curve starts at the second step" if len(main.buckets) < ENOUGH else ""
        return [line((f" {part}", "dim")) for part in wrapped(note, width - 1) or [""]][:height]
    low, high = x_range(traces, settings)
    rows, room = height - 1, width - AXIS_CELLS - 1
    seen = [_points(trace, low, high, room) for trace in traces]
    if not any(points.highs for points in seen):
        return [line((" no step has a place on this axis", "dim"))]
    window = _window(seen, low, high, settings.log_scale)
    canvas = Canvas(room, rows, window)
    for trace, points in zip(reversed(traces), reversed(seen), strict=True):  # the first on top
        _draw(canvas, trace, points)
    if settings.crosshair is not None:
        canvas.upright(main.place(settings.crosshair), "accent")
    labels = row_labels(window, rows)
    lines = [
        (
            (labels.get(row, " " * AXIS_CELLS), "axis"),
            ("┤" if row in labels else "│", "faint"),
            *dots,
        )
        for row, dots in enumerate(canvas.lines())
    ]
    return [*lines, x_axis(low, high, width, settings.by_tokens)]


def x_range(traces: Sequence[Trace], settings: ChartSettings) -> tuple[float, float]:
    """Return the shown part of the x axis: all of it, or a zoomed part around the crosshair.

    Without a crosshair a zoom shows the newest part. At least two points are inside.
    """
    main = traces[0]
    if settings.zoom >= 1.0:
        known = [trace for trace in traces if trace.buckets]
        return (
            min(trace.place(trace.buckets[0].last) for trace in known),
            max(trace.place(trace.buckets[-1].last) for trace in known),
        )
    places = [main.place(bucket.last) for bucket in main.buckets]
    first, last = places[0], places[-1]
    span = (last - first) * settings.zoom
    high = last
    if settings.crosshair is not None:
        centre = main.place(settings.crosshair)
        high = min(last, max(first + span, centre + span / 2))
    at = max(ENOUGH - 1, bisect_left(places, high))
    return min(high - span, places[min(at, len(places) - 1) - 1]), high


@dataclass(frozen=True, slots=True)
class _Points:
    """The points of a trace that are drawn: about two a column, for any length of the run."""

    xs: Sequence[float]
    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    smooths: Sequence[float]
    marks: Sequence[tuple[float, float]]
    spread: bool  # some points stand for several steps


def _points(trace: Trace, low: float, high: float, columns: int) -> _Points:
    """Return the part of a trace between two places; many neighbours become one point."""
    places = [trace.place(bucket.last) for bucket in trace.buckets]
    first, end = bisect_left(places, low), bisect_right(places, high)
    xs, buckets = places[first:end], trace.buckets[first:end]
    marks = [(trace.place(step), value) for step, value in trace.marks if drawable(value)]
    together = max(1, len(buckets) // (2 * columns))  # no fewer points than dots, so no gaps
    marks = [mark for mark in marks if low <= mark[0] <= high]
    if together == 1:
        return _Points(
            xs=xs,
            means=[b.total / b.count for b in buckets],
            lows=[b.low for b in buckets],
            highs=[b.high for b in buckets],
            smooths=[b.smooth for b in buckets],
            marks=marks,
            spread=max([b.count for b in buckets], default=1) > 1,
        )
    parts = [buckets[i : i + together] for i in range(0, len(buckets), together)]
    return _Points(
        xs=[xs[min(i + together, len(xs)) - 1] for i in range(0, len(xs), together)],
        means=[sum(b.total for b in part) / sum(b.count for b in part) for part in parts],
        lows=[min(b.low for b in part) for part in parts],
        highs=[max(b.high for b in part) for part in parts],
        smooths=[part[-1].smooth for part in parts],
        marks=marks,
        spread=True,
    )


def _window(seen: Sequence[_Points], low: float, high: float, log: bool) -> PlotWindow:
    """Return the window: y from the lowest to the highest value, without spikes (upper 1 %)."""
    highs = sorted(value for points in seen for value in points.highs)
    top = highs[min(len(highs) - 1, int(len(highs) * 0.99))]
    bottom = min(value for points in seen for value in points.lows)
    for points in seen:
        for _, value in points.marks:
            top, bottom = max(top, value), min(bottom, value)
    log = log and bottom > 1 / DRAWABLE
    room = max((top - bottom) * 0.04 or abs(top) * 0.05 or 1.0, 1 / DRAWABLE)
    bottom = bottom / 1.02 if log else bottom - room
    return PlotWindow(low, high, bottom, top + room, log)


def _draw(canvas: Canvas, trace: Trace, points: _Points) -> None:
    dashed = trace.dashed
    strokes = points.spread and not dashed
    canvas.draw(
        Series(
            points.xs, points.means, trace.role, dashed=dashed,
            lows=points.lows if strokes else None, highs=points.highs if strokes else None,
        )
    )  # fmt: skip
    if trace.smooth_role:
        canvas.draw(Series(points.xs, points.smooths, trace.smooth_role, dashed=dashed))
    if points.marks:
        places, values = zip(*points.marks, strict=True)
        canvas.draw(Series(places, values, trace.mark_role, mark=trace.mark))


def step_at(trace: Trace, settings: ChartSettings, column: int, width: int) -> int | None:
    """Return the step of the main trace that is drawn nearest to a column of the chart."""
    room = width - AXIS_CELLS - 1
    if len(trace.buckets) < ENOUGH or room < ENOUGH:
        return None
    low, high = x_range([trace], settings)
    x = low + (high - low) * min(1.0, max(0.0, (column - AXIS_CELLS - 1) / (room - 1)))
    return min(trace.buckets, key=lambda bucket: abs(trace.place(bucket.last) - x)).last


def row_labels(window: PlotWindow, rows: int) -> dict[int, str]:
    """Return a label for the rows next to round values (log: values at even heights)."""
    if window.log:
        step = max(1, rows // 4)
        values = [window.value_at(1 - (row + 0.5) / rows) for row in range(0, rows, step)]
    else:
        values = rounded_ticks(window.y_low, window.y_high, max(1, min(6, rows // 2)))
    labels: dict[int, str] = {}
    for value in values:
        row = min(rows - 1, max(0, round((1 - window.up(value)) * rows - 0.5)))
        labels[row] = f"{_tick(value):>{AXIS_CELLS - 1}} "
    return labels


def _tick(value: float) -> str:
    return f"{value:.4g}" if value else "0"


def x_axis(low: float, high: float, width: int, tokens: bool = False) -> Line:
    """Write numbers at the ends and, where there is room, at quarters between."""
    room = width - AXIS_CELLS - 1
    text = ["─"] * room
    count = 5 if room >= 60 else 3 if room >= 30 else 2
    for i in range(count):
        value = low + (high - low) * i / (count - 1)
        label = count_text(value).replace(" ", "") if tokens else str(round(value))
        at = round((room - 1) * i / (count - 1)) - (0 if i == 0 else len(label) // 2)
        at = max(0, min(at, room - len(label)))
        text[at : at + len(label)] = label
    spans: Line = ((" " * AXIS_CELLS, "axis"), ("└", "faint"))
    return fitted((*spans, *_axis_spans("".join(text))), width)


def _axis_spans(text: str) -> Line:
    spans: list[tuple[str, str]] = []
    for character in text:
        role = "faint" if character == "─" else "axis"
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + character, role)
        else:
            spans.append((character, role))
    return tuple(spans)
