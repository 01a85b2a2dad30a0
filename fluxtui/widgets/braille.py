"""A line chart of braille dots: two columns and four rows of dots a cell, one role a cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fluxtui.widgets.spans import Line, Span

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row], Unicode 11.0 ch. 21

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
    dashed: bool = False  # told from another line without its colour


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the plane that the chart shows. With `log` the y values are positive."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool = False

    def up(self, y: float) -> float:
        """Height of y in 0 (bottom) to 1 (top); may lie outside."""
        low, high = self.y_low, self.y_high
        if self.log:
            y, low, high = math.log(max(y, 1e-300)), math.log(low), math.log(high)
        return (y - low) / (high - low) if high > low else 0.5

    def value_at(self, up: float) -> float:
        """The inverse of `up`."""
        if self.log:
            return self.y_low * math.pow(self.y_high / self.y_low, up)
        return self.y_low + (self.y_high - self.y_low) * up


class Canvas:
    """Dots in `width` x `height` cells; later series win a cell's role."""

    def __init__(self, width: int, height: int, window: Window) -> None:
        self.width, self.height, self.window = width, height, window
        self._dots = [[0] * width for _ in range(height)]
        self._roles = [[""] * width for _ in range(height)]
        self._marks: dict[tuple[int, int], tuple[str, str]] = {}
        self._upright: tuple[int, str] | None = None  # column, role

    def draw(self, series: Series) -> None:
        """Add a series; what lies outside the window is left out."""
        previous: tuple[int, int] | None = None
        for i, (x, y) in enumerate(zip(series.xs, series.ys, strict=True)):
            if not self.window.x_low <= x <= self.window.x_high:
                continue
            dot = self._dot_of(x, y)
            if series.mark:
                self._marks[(dot[1] // 4, dot[0] // 2)] = (series.mark, series.role)
                continue
            if series.lows is not None and series.highs is not None:
                self._stroke(dot[0], x, series.lows[i], series.highs[i], series.role)
            elif previous is not None and series.joined:
                if dot == previous:
                    continue  # many steps share a dot
                self._segment(previous, dot, series)
            else:
                self._set(*dot, series.role)
            previous = dot

    def upright(self, x: float, role: str) -> None:
        """A line from top to bottom behind the dots; none where x is outside."""
        if self.window.x_low <= x <= self.window.x_high:
            self._upright = (self._dot_of(x, self.window.y_low)[0] // 2, role)

    def lines(self) -> list[Line]:
        """The rows from the top, runs of one role as one span."""
        return [self._line(row) for row in range(self.height)]

    def _dot_of(self, x: float, y: float) -> tuple[int, int]:
        window = self.window
        span = window.x_high - window.x_low
        across = (x - window.x_low) / span if span > 0 else 0.0
        column = round(across * (self.width * 2 - 1))
        up = max(0.0, min(1.0, window.up(y)))
        return column, round((1.0 - up) * (self.height * 4 - 1))

    def _set(self, column: int, row: int, role: str) -> None:
        if 0 <= column < self.width * 2 and 0 <= row < self.height * 4:
            self._dots[row // 4][column // 2] |= DOTS[column % 2][row % 4]
            self._roles[row // 4][column // 2] = role

    def _stroke(self, column: int, x: float, low: float, high: float, role: str) -> None:
        top, bottom = self._dot_of(x, high)[1], self._dot_of(x, low)[1]
        for row in range(top, bottom + 1):
            self._set(column, row, role)

    def _segment(self, start: tuple[int, int], end: tuple[int, int], series: Series) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for i in range(steps + 1):
            column = round(start[0] + (end[0] - start[0]) * i / steps)
            row = round(start[1] + (end[1] - start[1]) * i / steps)
            if not series.dashed or column % DASH_DOTS < DASH_DOTS - GAP_DOTS:
                self._set(column, row, series.role)

    def _line(self, row: int) -> Line:
        spans: list[Span] = []
        for column in range(self.width):
            mark = self._marks.get((row, column))
            if mark:
                text, role = mark
            elif self._upright and column == self._upright[0] and not self._dots[row][column]:
                text, role = "│", self._upright[1]
            else:
                dots = self._dots[row][column]
                text = chr(0x2800 + dots) if dots else " "
                role = self._roles[row][column] if dots else "text"
            if spans and spans[-1][1] == role:
                spans[-1] = (spans[-1][0] + text, role)
            else:
                spans.append((text, role))
        return tuple(spans)


def rounded_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values inside [low, high] (Heckbert, "Nice numbers", 1990)."""
    if count < 1 or high <= low:
        return []
    raw = (high - low) / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]
