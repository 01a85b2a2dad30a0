"""A widget that draws lines of spans and repaints only the lines that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.cache import FIFOCache
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from fluxtrain.events.printable import printable
from fluxtui.themes import PLAIN, Palette
from fluxtui.widgets.spans import BLANK, Line, differing, fitted, has_a_cell_each


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
        """Cut the strip at these cells; return the strip itself where the cut is at its end."""
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


class _Looks(dict[str, Style]):
    """The style of each role, made on first use."""

    def __init__(self, make: Callable[[str], Style]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, role: str) -> Style:
        self[role] = style = self._make(role)
        return style


class Lines(Widget):
    """Lines at fixed rows. `show` replaces them; equal lines are neither rebuilt nor repainted."""

    DEFAULT_CSS = "Lines { width: 1fr; height: 1fr; }"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lines: list[Line] = []
        self._rows: list[Line] = []  # the lines as they are drawn, each in `_width` cells
        self._strips: dict[int, Strip] = {}
        self._looks = _Looks(self._look)
        self._is_bare: bool | None = None  # nothing around or over the lines; None is not known
        self._width = 0
        self._palette: Palette = PLAIN

    def show(self, lines: Sequence[Line], palette: Palette) -> int:
        """Draw `lines` from the top; returns how many rows changed.

        Only the cells of a row that look different are painted: a changed number costs a few bytes.
        """
        width, height = self.size
        new = [*lines[:height], *([BLANK] * (height - len(lines)))]
        parts: list[Region] = []
        if palette is not self._palette or width != self._width or len(new) != len(self._lines):
            changed = list(range(height))
            self._rows = [_drawn(spans, width) for spans in new]
            self._looks.clear()
            parts = [Region(0, 0, width, height)] if height else []
        else:
            changed = [y for y in range(height) if new[y] != self._lines[y]]
            for y in changed:
                row = _drawn(new[y], width)
                parts += [Region(x, y, end - x, 1) for x, end in differing(self._rows[y], row)]
                self._rows[y] = row
        self._lines, self._palette, self._width = new, palette, width
        for y in changed:
            self._strips.pop(y, None)
        if parts:
            self.refresh(*parts)
        return len(changed)

    def render_line(self, y: int) -> Strip:
        """Draw one row, from the cache unless it changed."""
        return self._row(y, self.size.width)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Render without Textual's work for borders, tints and the like, which these lines lack."""
        if self._is_bare is None:
            self._is_bare = self._has_nothing_around()
        if not self._is_bare:
            return super().render_lines(crop)
        width = self.size.width
        strips = [self._row(y, width) for y in crop.line_range]
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _set_dirty(self, *regions: Region) -> None:
        """Mark dirty as Textual does; without regions the lines may look different too."""
        if regions and self._is_bare:
            self._repaint_regions.update(regions)
            return
        if not regions:
            self._strips.clear()
            self._looks.clear()
            self._is_bare = None
        super()._set_dirty(*regions)

    def _has_nothing_around(self) -> bool:
        styles = self.styles
        edges = (*styles.border, *styles.outline)
        return (
            not styles.padding
            and not any(kind for kind, _ in edges)
            and not styles.tint.a
            and styles.text_opacity == self.opacity == 1.0
            and not styles.has_rule("hatch")
        )

    def _row(self, y: int, width: int) -> Strip:
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != width:
            if width == self._width and y < len(self._rows):
                strip = self._strip(self._rows[y], width)
            else:
                strip = self._strip(
                    _drawn(self._lines[y] if y < len(self._lines) else BLANK, width), width
                )
            self._strips[y] = strip
        return strip

    def _strip(self, spans: Line, width: int) -> Strip:
        looks = self._looks
        return BriefStrip([Segment(text, looks[role]) for text, role in spans], width)

    def _look(self, role: str) -> Style:
        """Return the style of a role after the filters, which Textual does not apply here."""
        segments = [Segment(" ", self._palette.style(role))]
        for line_filter in self.get_line_filters() if self._is_bare else ():
            segments = line_filter.apply(segments, self.background_colors[1])
        return segments[0].style or Style.null()

    @property
    def text(self) -> str:
        """Return the drawn text without colours (for tests and for copying)."""
        return "\n".join("".join(text for text, _ in spans).rstrip() for spans in self._lines)


def _drawn(spans: Line, width: int) -> Line:
    """Draw the line in `width` cells, with marks in place of terminal control characters."""
    if not "".join([text for text, _ in spans]).isprintable():
        spans = tuple((printable(text), role) for text, role in spans)
    return fitted(spans, width)


class Ground(Widget):
    """A widget that shows its background alone: one row is drawn and used for all rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._row_of: dict[tuple[int, int], Strip] = {}  # by its cells

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return as many equal rows as are asked for."""
        row = self._row_of.get(crop.column_span)
        if row is None:
            [row] = super().render_lines(Region(crop.x, 0, crop.width, 1))
            self._row_of[crop.column_span] = row
        return [row] * crop.height

    def _set_dirty(self, *regions: Region) -> None:
        """Mark dirty as Textual does; without regions the colour may have changed."""
        if not regions:
            self._row_of.clear()
        super()._set_dirty(*regions)
