"""Intervals over the time of a step as bars: letters double the colours, nothing is hidden.

A cell shows the kind that takes most of its time: bright when it is busy for half of it or more,
quiet for a tenth, and as a dot for less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from fluxtrain.events.trace.lanes import Interval
from fluxtrain.units import duration_text
from fluxtui.widgets.spans import Line, Span

BRIGHT_FROM, QUIET_FROM = 0.5, 0.1
_TRACE, _EMPTY = "▪", "·"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a kind of work is drawn."""

    letter: str
    role: str
    label: str


class Cell(NamedTuple):
    """The leading kind of one slice of time, and how much of the slice the lane was busy."""

    kind: str
    share: float

    @property
    def level(self) -> int:
        """3 bright, 2 quiet, 1 a trace, 0 nothing."""
        return _level(self.share)


_REST = Cell("", 0.0)


def _level(share: float) -> int:
    if share >= BRIGHT_FROM:
        return 3
    return 2 if share >= QUIET_FROM else 1 if share > 0 else 0


def cells_of(intervals: Sequence[Interval], length_s: float, width: int) -> list[Cell]:
    """Cut the step's time into `width` slices."""
    if width <= 0:
        return []
    if length_s <= 0:
        return [_REST] * width
    slice_s = length_s / width
    busy: list[dict[str, float] | None] = [None] * width
    for _, kind, _, start_s, duration_s, *_ in intervals:
        stop_s = start_s + duration_s
        first = min(width - 1, int(start_s / slice_s))
        last = min(width - 1, int(stop_s / slice_s))
        for i in range(first, last + 1):
            begins_s, ends_s = i * slice_s, (i + 1) * slice_s
            inside = (stop_s if stop_s < ends_s else ends_s) - (
                start_s if start_s > begins_s else begins_s
            )
            if inside > 0:
                kinds = busy[i]
                if kinds is None:
                    busy[i] = {kind: inside}
                else:
                    kinds[kind] = kinds.get(kind, 0.0) + inside
    return [_leading(kinds, slice_s) if kinds else _REST for kinds in busy]


def _leading(kinds: dict[str, float], slice_s: float) -> Cell:
    if len(kinds) == 1:
        [(kind, inside)] = kinds.items()
        return Cell(kind, min(1.0, inside / slice_s))
    return Cell(max(kinds, key=kinds.__getitem__), min(1.0, sum(kinds.values()) / slice_s))


def bar(cells: Sequence[Cell], kind_of: Callable[[str], Kind], empty: str = _EMPTY) -> Line:
    """Draw the cells as spans; a run of equal cells begins with its label, or its letter."""
    spans: list[Span] = []
    for (level, name), run in groupby([(_level(share), kind) for kind, share in cells]):
        count = len(list(run))
        if level == 0:
            spans.append((empty * count, "faint"))
            continue
        kind = kind_of(name)
        if level == 1:
            spans.append((_TRACE * count, f"soft:{kind.role}"))
        elif level == 2:
            spans.append(((kind.letter.lower() * count), f"tile:{kind.role}"))
        else:
            label = f" {kind.label} "
            text = label if len(label) <= count else kind.letter
            spans.append((text.ljust(count), f"on:{kind.role}"))
    return tuple(spans)


def ruler(length_s: float, width: int) -> Line:
    """Times under the bars, from 0 to the step's length."""
    end = duration_text(length_s)
    count = max(1, min(4, width // 14))
    line = ["─"] * max(0, width)
    for i in range(count + 1):
        text = "0" if i == 0 else end if i == count else duration_text(length_s * i / count)
        at = min(round(i * width / count), width - len(text))
        at = at - len(text) // 2 if 0 < i < count else at
        if at >= 0 and at + len(text) <= width:
            line[at : at + len(text)] = text
    return (("".join(line), "axis"),)
