"""The loss by step: the spread of the raw values, their moving average, the evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtui.panels.panel import Panel, number_text, pair
from fluxtui.state.history import Bucket, Curve
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.braille import Canvas, Series, Window, rounded_ticks
from fluxtui.widgets.spans import Line, dropped_to_fit, fitted, line

AXIS_CELLS = 7  # " 1.234 ┤"
ENOUGH = 2


def heading(view: View, width: int) -> Line:
    """The newest values, and which line is which."""
    loss = view.state.loss
    newest = view.state.step.loss if view.state.step else None
    parts: list[Line] = [(("⡇", "train"), *pair(" train", number_text(newest)))]
    if view.chart.smooth:
        parts.append((("⠒", "smooth"), *pair(" ema", number_text(loss.smooth))))
    if view.state.evaluation:
        parts.append((("×", "evaluation"), *pair(" eval", number_text(view.state.evaluation.loss))))
    if view.chart.log_scale:
        parts.append((("log", "warn"),))
    if view.chart.zoom < 1.0:
        parts.append(((f"last {view.chart.zoom * 100:.0f}%", "warn"),))
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Chart with axes; says so while there is nothing to draw."""
    return chart(view.state.loss, list(view.state.evaluations), view.chart, width, height)


def chart(
    curve: Curve,
    marks: Sequence[tuple[int, float]],
    settings: ChartSettings,
    width: int,
    height: int,
) -> list[Line]:
    """`height` lines: rows of dots behind a y axis, then the x axis with its step numbers."""
    buckets = zoomed(curve.buckets, settings.zoom)
    if len(buckets) < ENOUGH or width < AXIS_CELLS + 8 or height < 3:
        note = "the curve starts at the second step" if len(buckets) < ENOUGH else ""
        return [line((f" {note}", "dim"))][:height]
    marks = [mark for mark in marks if mark[0] >= buckets[0].first]
    window = window_of(buckets, marks, settings.log_scale)
    rows = height - 1
    canvas = Canvas(width - AXIS_CELLS - 1, rows, window)
    xs = [float(bucket.last) for bucket in buckets]
    means = [bucket.mean for bucket in buckets]
    raw = "train" if settings.smooth else "smooth"
    spread_known = any(bucket.count > 1 for bucket in buckets)
    lows = [bucket.low for bucket in buckets] if spread_known else None
    highs = [bucket.high for bucket in buckets] if spread_known else None
    canvas.draw(Series(xs, means, raw, lows=lows, highs=highs))
    if settings.smooth:
        canvas.draw(Series(xs, [bucket.smooth for bucket in buckets], "smooth"))
    if marks:
        steps, losses = [float(m[0]) for m in marks], [m[1] for m in marks]
        canvas.draw(Series(steps, losses, "evaluation", mark="×"))
    labels = row_labels(window, rows)
    lines = [
        (
            (labels.get(row, " " * AXIS_CELLS), "axis"),
            ("┤" if row in labels else "│", "faint"),
            *dots,
        )
        for row, dots in enumerate(canvas.lines())
    ]
    return [*lines, x_axis(buckets[0].first, buckets[-1].last, width)]


def zoomed(buckets: Sequence[Bucket], share: float) -> Sequence[Bucket]:
    """The newest share of the buckets, never fewer than two."""
    count = max(ENOUGH, round(len(buckets) * share))
    return buckets[-count:]


def window_of(buckets: Sequence[Bucket], marks: Sequence[tuple[int, float]], log: bool) -> Window:
    """All of x; y from the lowest value to the highest but for rare spikes (upper 1 %)."""
    highs = sorted(bucket.high for bucket in buckets)
    top = highs[min(len(highs) - 1, int(len(highs) * 0.99))]
    low = min(bucket.low for bucket in buckets)
    for _, loss in marks:
        top, low = max(top, loss), min(low, loss)
    log = log and low > 0
    room = (top - low) * 0.04 or abs(top) * 0.05 or 1.0
    low = low / 1.02 if log else low - room
    return Window(float(buckets[0].last), float(buckets[-1].last), low, top + room, log)


def row_labels(window: Window, rows: int) -> dict[int, str]:
    """A label for the rows next to round values (log: values at even heights)."""
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


def x_axis(first: int, last: int, width: int) -> Line:
    """Step numbers at the ends and, where there is room, at quarters between."""
    room = width - AXIS_CELLS - 1
    text = ["─"] * room
    count = 5 if room >= 60 else 3 if room >= 30 else 2
    for i in range(count):
        label = str(round(first + (last - first) * i / (count - 1)))
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


PANEL = Panel(
    "loss", "Loss", body, heading, about="loss by step with evaluations; the full chart is 4"
)
