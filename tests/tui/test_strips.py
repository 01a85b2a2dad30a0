"""Rows drawn without Textual's styling machinery: the same picture, and nothing left to collect."""

from __future__ import annotations

import gc
import io
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.filter import DimFilter, LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from fluxtui.themes import PLAIN, Colourless, Palette, load_themes
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line, line
from fluxtui.widgets.strips import BriefStrip, part_of

STYLES = (Style(), Style(bold=True), Style(color="red", bgcolor="blue"))
TEXTS = st.text("ab ─⣿", min_size=1, max_size=9) | st.text("ab漢\u0301👍", min_size=1, max_size=9)
PIECES = st.tuples(TEXTS, st.sampled_from(STYLES)).map(lambda piece: Segment(*piece))
SEGMENTS = st.lists(PIECES, min_size=1, max_size=6)
ROWS: list[Line] = [
    line(("strong", "strong"), " text ", ("dim", "dim"), (" on ", "on:good"), (" s ", "soft:bad")),
    line(("tile", "tile:device"), ("漢字 wide", "warn"), ("\x1b[31m", "text")),
    line(("a line that is longer than the widget is wide, so that it is cut", "axis")),
]


def written(strip: Strip) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    return strip.render(console)


@given(SEGMENTS, st.integers(0, 60), st.integers(0, 60))
def test_a_part_is_what_textual_would_cut_out(segments: list[Segment], one: int, two: int) -> None:
    whole = Strip(segments)
    start, stop = sorted((min(one, whole.cell_length), min(two, whole.cell_length)))
    wanted = Strip(segments).crop(start, stop)
    if start < stop:
        assert written(Strip(part_of(whole, start, stop))) == written(wanted)


@given(SEGMENTS, st.lists(st.integers(1, 60), max_size=4))
def test_a_brief_strip_is_cut_as_any_other(segments: list[Segment], cuts: list[int]) -> None:
    width = Strip(segments).cell_length
    cuts = sorted({*cuts, width})
    brief, usual = BriefStrip(segments, width), Strip(segments, width)
    for _ in range(2):
        parts, wanted = brief.divide(cuts), usual.divide(cuts)
        assert [written(part) for part in parts] == [written(part) for part in wanted]


def test_a_strip_that_was_drawn_leaves_no_garbage() -> None:
    gc.collect()
    for make in (BriefStrip, Strip):
        strip = make([Segment("a row")], 5)
        assert strip.divide([5]) == [strip]
        del strip
        assert bool(gc.collect()) == (make is Strip), "Textual's own holds itself"


class Board(App[None]):
    """One widget of lines."""

    CSS = "Screen.framed Lines { border: round red; padding: 0 2; }"

    def compose(self) -> ComposeResult:
        self.lines = Lines()
        yield self.lines


def looks(strips: list[Strip]) -> list[list[tuple[str, Style | None]]]:
    """Character and style of each cell."""
    return [[(c, segment.style) for segment in strip for c in segment.text] for strip in strips]


def textuals(lines: Lines) -> list[Strip]:
    """What Textual draws of the same lines, with its filters."""
    with patch.object(lines, "_is_bare", False):
        lines._strips.clear()
        lines._looks.clear()
        lines._styles_cache.clear()
        strips = Widget.render_lines(lines, lines.size.region)
    lines._strips.clear()
    lines._looks.clear()
    return strips


PALETTES = {name: theme.palette for name, theme in load_themes()[0].items()} | {"PLAIN": PLAIN}


@pytest.mark.parametrize("more", [[], [Colourless()], [DimFilter()]], ids=["", "grey", "dim"])
@pytest.mark.parametrize("palette", PALETTES.values(), ids=list(PALETTES))
async def test_lines_look_as_textual_draws_them(palette: Palette, more: list[LineFilter]) -> None:
    app = Board()
    app._filters += more
    async with app.run_test(size=(40, 6)) as pilot:
        app.lines.show(ROWS, palette)
        await pilot.pause()
        assert looks(app.lines.render_lines(app.lines.size.region)) == looks(textuals(app.lines))


async def test_only_the_asked_part_is_drawn() -> None:
    app = Board()
    async with app.run_test(size=(40, 6)) as pilot:
        app.lines.show(ROWS, PLAIN)
        await pilot.pause()
        whole = app.lines.render_lines(Region(0, 0, 40, 6))
        part = app.lines.render_lines(Region(3, 1, 10, 2))
        assert looks(part) == looks([strip.crop(3, 13) for strip in whole[1:3]])


async def test_a_border_is_drawn_around_lines_that_are_given_one() -> None:
    app = Board()
    async with app.run_test(size=(40, 8)) as pilot:
        app.lines.show(ROWS, PLAIN)
        await pilot.pause()
        assert app.screen._compositor.render_strips()[0].text.startswith("strong")
        app.screen.add_class("framed")
        await pilot.pause()
        app.lines.show(ROWS, PLAIN)
        await pilot.pause()
        rows = [strip.text for strip in app.screen._compositor.render_strips()]
        assert rows[0].startswith("╭─") and rows[1].startswith("│  strong")
        app.screen.remove_class("framed")
        await pilot.pause()
        app.lines.show(ROWS, PLAIN)
        await pilot.pause()
        assert app.screen._compositor.render_strips()[0].text.startswith("strong")
