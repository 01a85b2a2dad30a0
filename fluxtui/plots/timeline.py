"""Charts over wall clock time: tracks of samples, the age on the x axis, "now" at the right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fluxtrain.units import duration_text
from fluxtui.plots.braille import Canvas, PlotWindow, Series, rounded_ticks
from fluxtui.state.history import drawable
from fluxtui.widgets.spans import Line, fitted

AXIS_CELLS = 10


@dataclass(frozen=True, slots=True)
class Track:
    """Values at the times of the chart; None where nothing was measured."""

    values: Sequence[float | None]
    role: str
    letter: str = ""  # drawn at the highest value, so that lines differ without colour


def timeline(
    times: Sequence[float],
    tracks: Sequence[Track],
    width: int,
    height: int,
    write: Callable[[float | None], str],
    mark: float | None = None,
    thousand: float = 1000.0,
) -> list[Line]:
    """Draw `height` lines from zero to the highest value; `mark` is a level drawn across.

    Labels are round in multiples of powers of `thousand` (1024 for bytes).
    """
    if width < AXIS_CELLS + 8 or height < 3 or len(times) < 2:
        return []
    tracks = [
        replace(track, values=[value if drawable(value) else None for value in track.values])
        for track in tracks
    ]
    known = [value for track in tracks for value in track.values if value is not None]
    mark = mark if drawable(mark) else None
    top = max([*known, mark or 0.0], default=0.0) * 1.05 or 1.0
    window = PlotWindow(times[0], times[-1], 0.0, top)
    canvas = Canvas(width - AXIS_CELLS - 1, height - 1, window)
    if mark is not None:
        span = times[-1] - times[0]
        across = [times[0] + span * i / canvas.width for i in range(0, canvas.width + 1, 2)]
        canvas.draw(Series(across, [mark] * len(across), "evaluation", joined=False))
    for track in tracks:
        pairs = [
            (t, value) for t, value in zip(times, track.values, strict=True) if value is not None
        ]
        canvas.draw(Series([p[0] for p in pairs], [p[1] for p in pairs], track.role))
    _letters(canvas, times, tracks)
    labels = axis_labels(window, height - 1, write, thousand)
    lines: list[Line] = [
        (
            (f"{labels.get(row, ''):>{AXIS_CELLS - 1}} ", "axis"),
            ("┤" if row in labels else "│", "faint"),
            *dots,
        )
        for row, dots in enumerate(canvas.lines())
    ]
    return [*lines, ages(times[-1] - times[0], width)]


def _letters(canvas: Canvas, times: Sequence[float], tracks: Sequence[Track]) -> None:
    """Place a letter at the highest place of each track that no other letter has taken."""
    cell_s = (times[-1] - times[0]) / max(1, canvas.width)
    taken: list[float] = []
    for track in tracks:
        points = [(v, t) for t, v in zip(times, track.values, strict=True) if v]
        free = [point for point in points if all(abs(point[1] - t) > cell_s for t in taken)]
        if track.letter and free:
            high, at_s = max(free)
            taken.append(at_s)
            canvas.draw(Series([at_s], [high], track.role, mark=track.letter))


def axis_labels(
    window: PlotWindow, rows: int, write: Callable[[float | None], str], thousand: float
) -> dict[int, str]:
    """Label the rows with round values; `thousand` is 1024 for bytes."""
    unit = 1.0
    while window.y_high >= unit * thousand:
        unit *= thousand
    ticks = rounded_ticks(0.0, window.y_high / unit, max(1, min(5, rows // 2)))
    values = [tick * unit for tick in ticks]
    return {
        min(rows - 1, max(0, round((1 - window.up(value)) * rows - 0.5))): write(value)
        for value in values
    }


def ages(span_s: float, width: int) -> Line:
    """Draw the x axis, with the age of its left end."""
    start, end = f"{duration_text(span_s)} ago", "newest"
    rule = "─" * max(0, width - AXIS_CELLS - 1 - len(start) - len(end))
    return fitted(
        (
            (" " * AXIS_CELLS, "axis"), ("└", "faint"), (start, "axis"), (rule, "faint"),
            (end, "axis"),
        ),
        width,
    )  # fmt: skip
