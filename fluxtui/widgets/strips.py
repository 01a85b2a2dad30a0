"""Textual's row of a widget, without caches, for rows that change several times a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.segment import Segment
from textual.cache import FIFOCache
from textual.strip import Strip

from fluxtui.widgets.spans import has_a_cell_each


class _Nothing(FIFOCache[Any, Any]):
    """A cache that keeps nothing."""

    def set(self, key: Any, value: Any) -> None:
        """Forget the value."""

    __setitem__ = set


_NOTHING = _Nothing(0)


class BriefStrip(Strip):
    """A strip that is drawn once and then replaced, and so caches nothing.

    Textual's own strip makes seven caches, and puts itself into one of them: only the garbage
    collector frees it, which took a tenth of the app's time.
    """

    __slots__ = ()

    def __init__(self, segments: Iterable[Segment], cell_length: int) -> None:
        self._segments = list(segments)
        self._cell_length = cell_length
        self._divide_cache = self._crop_cache = self._style_cache = _NOTHING
        self._filter_cache = self._line_length_cache = self._crop_extend_cache = _NOTHING
        self._offsets_cache = _NOTHING
        self._render_cache = self._link_ids = self._cell_count = None

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Cut the strip at these cells; itself where that is its end."""
        cuts = list(cuts)
        return [self] if cuts == [self.cell_length] else super().divide(cuts)


def part_of(strip: Strip, start: int, stop: int) -> Iterable[Segment]:
    """Return the cells from `start` up to `stop`."""
    if start <= 0 and stop >= strip.cell_length:
        return strip
    if not has_a_cell_each(strip.text):  # a character may be cut in two, or follow its cell
        return strip.crop(start, stop)
    x = 0
    found: list[Segment] = []
    for segment in strip:
        text, style, _ = segment
        end = x + len(text)
        if end > start:
            whole = start <= x and end <= stop
            found.append(segment if whole else Segment(text[max(0, start - x) : stop - x], style))
            if end >= stop:
                break
        x = end
    return found
