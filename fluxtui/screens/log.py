"""Screen 5: the run's log, newest last, with a filter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input

from fluxtui.actions.key_map import screen_bindings
from fluxtui.panels.log import rows
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.history import History
from fluxtui.state.log_lines import HeldLog, LogFilter
from fluxtui.state.run import LogLine
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.entry import PrintableInput
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import Line, Span, dropped_to_fit
from fluxtui.words import counted


class LogScreen(RunScreen):
    """The run's log, filtered by words, level and kind; matches are marked."""

    NAME = "log"
    AUTO_FOCUS = "#body"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("log")
    DEFAULT_CSS = """
    LogScreen > Input { display: none; height: 1; border: none; padding: 0 1; }
    LogScreen > Input.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.wanted = LogFilter()
        self.newest = ""  # the last line that the filter lets through
        self.following = True
        self._held: HeldLog | None = None  # while not following

    def compose_body(self) -> ComposeResult:
        yield Lines(id="summary", classes="chrome")
        yield ScrollingLines(id="body")
        yield PrintableInput(
            placeholder="words, a level (warning) or a kind (checkpoint)", id="wanted"
        )

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        width = body.size.width
        lines_of_log, newer = self._lines_to_show(view.state.log)
        entries = [entry for entry in lines_of_log if self.wanted.passes(entry)]
        self.newest = entries[-1].text if entries else ""
        words = self.wanted.words
        lines = [
            marked((("  ", "text"), *spans), words)
            for entry in entries
            for spans in rows(entry, width - 4, dates=width >= 100)
        ]
        body.show_all(lines, palette, at_end=self.following)
        self.query_one("#summary", Lines).show(
            [_summary(self.wanted, len(entries), len(lines_of_log), self.following, newer, width)],
            palette,
        )

    def _lines_to_show(self, log: History[LogLine]) -> tuple[Sequence[LogLine], int]:
        """Return the newest lines, or the held lines and how many are newer."""
        if self.following:
            self._held = None
            return list(log), 0
        self._held = HeldLog.of(log) if self._held is None else self._held.after(log)
        return self._held.lines, self._held.newer(log)

    def action_filter(self) -> None:
        """Let the user type a filter; Enter keeps it, Escape drops it."""
        field = self.query_one("#wanted", Input)
        field.add_class("-open")
        field.focus()

    def action_log_level(self) -> None:
        """Show only lines from one level higher up, then all again."""
        self.wanted = self.wanted.next_level()
        self.draw()

    def action_log_kind(self) -> None:
        """Show only lines of the next kind, then all again."""
        self.wanted = self.wanted.next_kind(self.flux.view.state.log)
        self.draw()

    def action_follow(self) -> None:
        """Stay at the newest line, or stop doing so."""
        self.following = not self.following
        self.draw()

    def text_to_copy(self) -> str:
        """Return the newest line that is shown, else what all screens copy."""
        return self.newest or super().text_to_copy()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.wanted = replace(self.wanted, text=event.value)
        self.draw()

    def on_input_submitted(self) -> None:
        self._close_filter()

    def key_escape(self) -> None:
        """Drop the filter."""
        self.query_one("#wanted", Input).value = ""
        self.wanted = LogFilter()
        self._close_filter()

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self.following = event.at_end
        self.draw()

    def _close_filter(self) -> None:
        self.query_one("#wanted", Input).remove_class("-open")
        self.query_one("#body").focus()
        self.call_after_refresh(self.draw)


def marked(spans: Line, words: Sequence[str]) -> Line:
    """Mark every occurrence of a word in the line."""
    if not words:
        return spans
    pattern = re.compile("|".join(re.escape(word) for word in words), re.IGNORECASE)
    found: list[Span] = []
    for text, role in spans:
        end = 0
        for match in pattern.finditer(text):
            if match.start() > end:
                found.append((text[end : match.start()], role))
            found.append((match[0], "selected"))
            end = match.end()
        if end < len(text):
            found.append((text[end:], role))
    return tuple(found)


def _summary(
    wanted: LogFilter, shown: int, all_lines: int, following: bool, newer: int, width: int
) -> Line:
    parts: list[Line] = [((f"  {counted(all_lines, 'line')}", "dim"),)]
    if wanted != LogFilter():
        parts = [((f"  {shown:,} of {counted(all_lines, 'line')}", "dim"),)]
    if wanted.text:
        parts.append((("with ", "dim"), (wanted.text, "accent")))
    if wanted.least != "debug":
        parts.append((("level ", "dim"), (f"{wanted.least} and up", "accent")))
    if wanted.kind:
        parts.append((("only ", "dim"), (wanted.kind, "accent")))
    held = f"held here, {counted(newer, 'newer line')}" if newer else "held here"
    parts.append((("following the newest", "good"),) if following else ((held, "warn"),))
    return dropped_to_fit(parts, width)
