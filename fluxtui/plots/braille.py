"""A line chart of braille dots: two columns and four rows of dots a cell, one role a cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from fluxtui.widgets.spans import Line, Span

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row], Unicode 11.0 ch. 21

_BRAILLE = str.maketrans({0: " ", **{dots: chr(0x2800 + dots) for dots in range(1, 256)}})
DASH_DOTS = 6
GAP_DOTS = 2


@dataclass(frozen=True, slots=True)
class Series:
    """Points by x; `low` and `high` at a point draw an upright stroke (the spread of a bucket)."""

    xs: Sequence[float]
    ys: Sequence[float]
    role: str
    joined: bool = True
    lows: Sequence[float] | None = None
    highs: Sequence[float] | None = None
    mark: str = ""  # a glyph instead of dots
    dashed: bool = False  # so that it differs from other lines without colour


@dataclass(frozen=True, slots=True)
class PlotWindow:
    """The part of the plane that the chart shows. With `log` the y values are positive."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool = False

    def up(self, y: float) -> float:
        """Return the height of y from 0 (bottom) to 1 (top); it may lie outside."""
        return self.ups([y])[0]

    def ups(self, ys: Sequence[float]) -> list[float]:
        """Return the heights of several values."""
        low, high = self.y_low, self.y_high
        if self.log:
            ys, low, high = [math.log(max(y, 1e-300)) for y in ys], math.log(low), math.log(high)
        span = high - low
        return [(y - low) / span for y in ys] if high > low else [0.5] * len(ys)

    def value_at(self, up: float) -> float:
        """Return the value at a height, the inverse of `up`."""
        if self.log:
            return self.y_low * math.pow(self.y_high / self.y_low, up)
        return self.y_low + (self.y_high - self.y_low) * up


class Canvas:
    """Dots in `width` x `height` cells; later series win a cell's role."""

    def __init__(self, width: int, height: int, window: PlotWindow) -> None:
        self.width, self.height, self.window = width, height, window
        self._dots = bytearray(width * height)  # of each cell, row by row
        self._roles = ["text"] * (width * height)
        self._marks: dict[int, tuple[str, str]] = {}  # by cell
        self._upright: tuple[int, str] | None = None  # column, role

    def draw(self, series: Series) -> None:
        """Add a series; what lies outside the window is left out."""
        if self.width <= 0 or self.height <= 0:
            return
        low, high = self.window.x_low, self.window.x_high
        inside = [i for i, x in enumerate(series.xs) if low <= x <= high]
        columns = self._columns([series.xs[i] for i in inside])
        rows = self._rows([series.ys[i] for i in inside])
        if series.mark:
            for column, row in zip(columns, rows, strict=True):
                self._marks[row // 4 * self.width + column // 2] = (series.mark, series.role)
        elif series.lows is not None and series.highs is not None:
            bottoms = self._rows([series.lows[i] for i in inside])
            tops = self._rows([series.highs[i] for i in inside])
            for column, top, bottom in zip(columns, tops, bottoms, strict=True):
                self._set([(column, row) for row in range(top, bottom + 1)], series)
        elif series.joined and inside:
            self._joined(list(zip(columns, rows, strict=True)), series)
        else:
            self._set(list(zip(columns, rows, strict=True)), series)

    def upright(self, x: float, role: str) -> None:
        """Draw a line from top to bottom behind the dots; none where x is outside."""
        if self.window.x_low <= x <= self.window.x_high:
            self._upright = (self._columns([x])[0] // 2, role)

    def lines(self) -> list[Line]:
        """Return the rows from the top, runs of one role as one span."""
        return [self._line(row) for row in range(self.height)]

    def _columns(self, xs: Sequence[float]) -> list[int]:
        """Return the columns of dots for these places."""
        low, last = self.window.x_low, self.width * 2 - 1
        span = self.window.x_high - low
        return [round((x - low) / span * last) for x in xs] if span > 0 else [0] * len(xs)

    def _rows(self, ys: Sequence[float]) -> list[int]:
        """Return the rows of dots for these values, counted from the top."""
        last = self.height * 4 - 1
        ups = [up if 0.0 <= up <= 1.0 else float(not up < 0.0) for up in self.window.ups(ys)]
        return [round((1.0 - up) * last) for up in ups]

    def _set(self, dots: Iterable[tuple[int, int]], series: Series) -> None:
        """Set dots by column and row."""
        cells, roles, width, role = self._dots, self._roles, self.width, series.role
        for column, row in dots:
            cell = (row >> 2) * width + (column >> 1)
            cells[cell] |= DOTS[column & 1][row & 3]
            roles[cell] = role

    def _joined(self, dots: Sequence[tuple[int, int]], series: Series) -> None:
        """Connect these dots with a line."""
        path = [
            (x + across, y + down)
            for (x, y), (to_x, to_y) in pairwise(dots)
            for across, down in _steps(to_x - x, to_y - y, x & 1, y & 1)
        ]
        if series.dashed:
            path = [dot for dot in path if dot[0] % DASH_DOTS < DASH_DOTS - GAP_DOTS]
        self._set([dots[0], *path], series)

    def _line(self, row: int) -> Line:
        first, end = row * self.width, (row + 1) * self.width
        dots, roles = self._dots[first:end], self._roles[first:end]
        text = dots.decode("latin-1").translate(_BRAILLE)
        if self._upright is not None and not dots[self._upright[0]]:
            column, roles[column] = self._upright
            text = f"{text[:column]}│{text[column + 1 :]}"
        for cell, (mark, role) in self._marks.items():
            if first <= cell < end:
                column = cell - first
                text, roles[column] = f"{text[:column]}{mark}{text[column + 1 :]}", role
        spans: list[Span] = []
        start = 0
        for role, run in groupby(roles):
            stop = start + len(list(run))
            spans.append((text[start:stop], role))
            start = stop
        return tuple(spans)


@lru_cache(maxsize=4096)
def _steps(across: int, down: int, x: int, y: int) -> tuple[tuple[int, int], ...]:
    """Return the dots of a line to the dot that is `across` and `down` from its start.

    Of x and y only the parity matters, because halves are rounded to even dots.
    """
    count = max(abs(across), abs(down))
    return tuple(
        (round(x + across * i / count) - x, round(y + down * i / count) - y)
        for i in range(1, count + 1)
    )


def rounded_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values inside [low, high] (Heckbert, "Nice numbers", 1990)."""
    if count < 1 or high <= low:
        return []
    raw = (high - low) / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]
