"""What goes to the terminal: the changed cells and little more, and the same picture."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from types import ModuleType

import pyte
from hypothesis import given
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate
from textual.strip import Strip

from fluxtui.widgets.screen_updates import PartsUpdate, shorter
from fluxtui.widgets.spans import Line, differing, fitted, width_of
from tests.tui.desk import Desk

ROLES = ("text", "dim", "good")
TEXTS = st.text(st.sampled_from("ab ─⣿12"), max_size=9)
WIDE_TEXTS = st.text(st.sampled_from("ab 漢\u0301👍"), max_size=9)
LINES = st.lists(st.tuples(TEXTS, st.sampled_from(ROLES)), max_size=6).map(tuple)
WIDE_LINES = st.lists(st.tuples(WIDE_TEXTS, st.sampled_from(ROLES)), max_size=6).map(tuple)


@given(WIDE_LINES, WIDE_LINES, st.integers(1, 60))
def test_a_line_with_wide_or_joined_characters_is_never_cut(
    old: Line, new: Line, width: int
) -> None:
    joins = any(not c.isascii() for line in (old, new) for text, _ in line for c in text)
    if joins and width >= max(width_of(old), width_of(new)):
        assert differing(fitted(old, width), fitted(new, width)) == [(0, width)]


def update_of(line: Line, x: int, *parts: tuple[int, int]) -> ChopsUpdate:
    """The line in a widget whose first cell is the screen's `x`."""
    styles = {"text": Style(), "dim": Style(dim=True), "good": Style(color="green")}
    strip = Strip([Segment(text, styles[role]) for text, role in line])
    spans = [(0, x + start, x + end) for start, end in parts]
    return ChopsUpdate([{x: strip}], spans, [[x + strip.cell_length]])


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)


def on_screen(*texts: str) -> list[tuple[str, str, bool]]:
    screen = pyte.Screen(80, 1)
    for text in texts:
        pyte.Stream(screen).feed(text)
    row = screen.buffer[0]
    return [(row[i].data, row[i].fg, row[i].bold) for i in range(80)]


@given(LINES, LINES, st.integers(0, 20))
def test_the_parts_make_the_same_picture_as_the_whole_line(old: Line, new: Line, x: int) -> None:
    width = 50
    old, new = fitted(old, width), fitted(new, width)
    whole = [update_of(line, x, (0, width)).render_segments(console()) for line in (old, new)]
    parts = differing(old, new)
    update = update_of(new, x, *parts) if parts else None
    changed = shorter(PartsUpdate.of(update).render_segments(console())) if update else ""
    assert on_screen(whole[0], changed) == on_screen(whole[0], whole[1])


def test_a_number_that_changes_at_the_end_of_a_line_costs_no_line() -> None:
    line: Line = (("│ step ", "dim"), ("17", "text"), ("─" * 60, "dim"), (" 2.0%", "good"))
    other: Line = (*line[:3], (" 2.1%", "good"))
    parts = differing(line, other)
    assert parts == [(72, 73)]
    written = PartsUpdate.of(update_of(other, 3, *parts)).render_segments(console())
    assert len(written.encode()) < 30
    assert len(update_of(other, 3, *parts).render_segments(console()).encode()) > 200, "Textual's"


COLOURS = st.sampled_from(
    (None, "red", "bright_blue", "color(100)", "#102030", "#aabbcc", "default")
)
LOOKS = st.builds(
    Style, color=COLOURS, bgcolor=COLOURS, bold=st.booleans(), italic=st.booleans(),
    underline=st.booleans(), reverse=st.booleans(), strike=st.booleans(),
)  # fmt: skip


@given(st.lists(st.tuples(st.text("ab ", min_size=1, max_size=3), LOOKS), max_size=12), st.data())
def test_any_styles_look_the_same_in_fewer_bytes(
    pieces: list[tuple[str, Style]], data: st.DataObject
) -> None:
    written = ""
    for text, style in pieces:
        if data.draw(st.booleans()):
            written += f"\x1b[1;{data.draw(st.integers(1, 60))}H"
        written += style.render(text, color_system=ColorSystem.TRUECOLOR)
    screens = [pyte.Screen(80, 1), pyte.Screen(80, 1)]
    for screen, told in zip(screens, (written, shorter(written)), strict=True):
        pyte.Stream(screen).feed(told + "x")  # what follows has no style
    assert [screens[0].buffer[0][x] for x in range(80)] == [
        screens[1].buffer[0][x] for x in range(80)
    ]
    assert len(shorter(written)) <= len(written)


def test_after_many_small_changes_the_terminal_shows_what_a_whole_redraw_shows(
    desk: Desk, made: ModuleType
) -> None:
    """In a real terminal, where parts of lines were drawn over each other."""
    run: Path = desk.runs / "watched"
    made.write(run / "events.ndjson", made.training(40))
    terminal = desk.open("--attach", str(run))
    terminal.until("step 40/200", "detach")
    for key, shown in (("4", "At the crosshair"), ("h", "step 39"), ("3", "Stalls"), ("1", "Log")):
        terminal.press(key)
        terminal.until(shown)
    terminal.press("e")  # hides the average: the chart changes here and there
    terminal.quiet()
    left = [row[:70] for row in terminal.screen.display]  # the machine is right of it
    terminal.process.send_signal(signal.SIGSTOP)
    terminal.wiped()
    terminal.process.send_signal(signal.SIGCONT)
    while b"\x1b[?1049h" not in terminal.output:
        assert terminal.read(0.1)
    terminal.until("step 40/200", "detach")
    terminal.quiet()
    assert [row[:70] for row in terminal.screen.display] == left
