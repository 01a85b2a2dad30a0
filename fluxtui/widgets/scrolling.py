"""A long list of lines that scrolls by keys and wheel, with an optional cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message

from fluxtui.actions.key_map import own_bindings
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line

WHEEL_ROWS = 3


class ScrollingLines(Lines, can_focus=True):
    """Keeps an offset into the lines; with `cursor` a selected line that Enter chooses."""

    BINDINGS: ClassVar[list[BindingType]] = own_bindings()

    class Scrolled(Message):
        """The user moved; `at_end` tells whether the last line is in view."""

        def __init__(self, at_end: bool) -> None:
            super().__init__()
            self.at_end = at_end

    class Chosen(Message):
        """The user pressed Enter on the line `index`."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, cursor: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.offset_rows = 0
        self.cursor: int | None = 0 if cursor else None
        self.marks_cursor = True  # False while the line under it is none that the user chose
        self._all: Sequence[Line] = ()
        self._drawn_with: Palette | None = None

    def show_all(self, lines: Sequence[Line], palette: Palette, at_end: bool = False) -> None:
        """Draw the part of `lines` that is in view; `at_end` keeps to the newest."""
        self._all, self._drawn_with = lines, palette
        if at_end:
            self.offset_rows = len(lines)
        self._redraw()

    @property
    def _last_offset(self) -> int:
        return max(0, len(self._all) - self.size.height)

    def _redraw(self) -> None:
        if self._drawn_with is None:
            return
        if self.cursor is not None:
            self.cursor = max(0, min(self.cursor, len(self._all) - 1))
            top = self.cursor - self.size.height + 1
            self.offset_rows = max(top, min(self.offset_rows, self.cursor))
        self.offset_rows = max(0, min(self.offset_rows, self._last_offset))
        part = list(self._all[self.offset_rows : self.offset_rows + self.size.height])
        if self.cursor is not None and self.marks_cursor and part:
            at = self.cursor - self.offset_rows
            part[at] = tuple((text, "selected") for text, _ in part[at])
        self.show(part, self._drawn_with)

    def _moved(self, rows: int) -> None:
        if self.cursor is not None:
            self.cursor += rows if self.marks_cursor else 0
            self.marks_cursor = True
        else:
            self.offset_rows += rows
        self._redraw()
        self.post_message(self.Scrolled(self.offset_rows >= self._last_offset))

    def action_move(self, rows: int) -> None:
        """Scroll one line up or down."""
        self._moved(rows)

    def action_page(self, pages: int) -> None:
        """Scroll one page up or down."""
        self._moved(pages * max(1, self.size.height - 1))

    def action_edge(self, last: int) -> None:
        """Scroll to the first or the last line."""
        self._moved(len(self._all) if last else -len(self._all))

    def action_choose(self) -> None:
        """Choose the line under the cursor."""
        if self.cursor is not None and self._all:
            self.post_message(self.Chosen(self.cursor))

    def on_click(self, event: Click) -> None:
        """Put the cursor on the line under the pointer; the second click chooses it."""
        at = self.offset_rows + event.y
        if self.cursor is None or at >= len(self._all):
            return
        self._moved(at - self.cursor)
        if event.chain == 2:
            self.action_choose()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self._moved(WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self._moved(-WHEEL_ROWS)
