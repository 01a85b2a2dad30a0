"""A background of one colour behind other widgets."""

from __future__ import annotations

from typing import Any

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


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
