"""Spans, bars, charts and arrangements: they keep their size and their proportions."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtui.actions.table import PANEL_SCREENS
from fluxtui.plots.bars import LEVELS, BarPart, cells_of, gauge, partition, sparks
from fluxtui.plots.braille import DOTS, Canvas, PlotWindow, Series, rounded_ticks
from fluxtui.plots.timeline import Track, timeline
from fluxtui.screens import arrangement
from fluxtui.screens.arrangement import Arrangement, too_small
from fluxtui.widgets.spans import (
    Line,
    dropped_to_fit,
    fitted,
    joined,
    line,
    spread,
    width_of,
    wrapped,
)

texts = st.text("ab ⇅é漢", max_size=12)
lines = st.lists(st.tuples(texts, st.sampled_from(["dim", "text"])), max_size=6).map(tuple)


def text_of(spans: Line) -> str:
    return "".join(text for text, _ in spans)


@given(lines, st.integers(0, 60))
def test_a_fitted_line_has_exactly_the_width(spans: Line, width: int) -> None:
    assert width_of(fitted(spans, width)) == width


@given(lines, lines, st.integers(4, 60))
def test_both_ends_together_have_exactly_the_width(left: Line, right: Line, width: int) -> None:
    assert width_of(spread(left, right, width)) == width


def test_a_line_that_is_cut_ends_with_an_ellipsis() -> None:
    assert text_of(fitted(line("abcdef"), 4)) == "abc…"


def test_parts_that_do_not_fit_are_left_out_whole() -> None:
    parts = [line("first"), line("a very long second part"), line("third")]
    assert text_of(dropped_to_fit(parts, 14)) == "first  third"
    assert text_of(joined([(), line("a"), (), line("b")])) == "a  b"


@given(st.text("abc de漢", max_size=80), st.integers(2, 30))
def test_wrapping_keeps_every_character_and_the_width(text: str, width: int) -> None:
    parts = wrapped(text, width)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(len(part) <= width for part in parts)
    assert all(part for part in parts)


# --- bars -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.integers(1, 200))
def test_cells_sum_to_the_width_and_nothing_is_two_cells_off(
    values: list[float], width: int
) -> None:
    cells = cells_of(values, width)
    total = sum(values)
    if total <= 0:
        assert sum(cells) == 0
        return
    assert sum(cells) == width
    if width >= 4 * len(values):
        exact = [value / total * width for value in values]
        assert all(
            abs(got - want) < len(values) + 1 for got, want in zip(cells, exact, strict=True)
        )


def test_a_small_share_still_gets_a_cell() -> None:
    assert cells_of([1e9, 1e7], 10) == [9, 1]
    assert cells_of([1e9, 1e6], 10) == [10, 0]  # a trace
    assert cells_of([1e9, 0.0], 10) == [10, 0]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6), st.integers(1, 80))
def test_a_partition_fills_its_width(values: list[float], width: int) -> None:
    parts = [BarPart(f"part{i}", "P", value, "weights") for i, value in enumerate(values)]
    assert width_of(partition(parts, width)) == width


def test_a_part_says_its_name_or_its_letter_by_its_room() -> None:
    bar = text_of(partition([BarPart("weights", "W", 80, "a"), BarPart("cache", "C", 20, "b")], 20))
    assert bar.startswith(" weights") and bar[16:].strip(" ▏") == "C"


@given(st.one_of(st.none(), st.floats(-1, 2)), st.integers(0, 50))
def test_a_gauge_has_its_width_whatever_the_share(share: float | None, width: int) -> None:
    assert width_of(gauge(share, width, "good")) == width


def test_a_gauge_shows_nothing_known_differently_from_nothing_used() -> None:
    assert gauge(None, 4, "good") != gauge(0.0, 4, "good")
    assert text_of(gauge(0.5, 4, "good")) == "━━──"


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=40),
    st.integers(1, 30),
    st.integers(1, 5),
)
def test_sparklines_keep_their_box(values: list[float | None], width: int, rows: int) -> None:
    drawn = sparks(values, width, rows, 1e9, "device")
    assert len(drawn) == rows
    assert all(width_of(row) == width for row in drawn)


def test_a_column_is_as_high_as_its_value() -> None:
    drawn = [text_of(row) for row in sparks([0.0, 0.25, 0.5, 1.0], 4, 2, 1.0, "device")]
    assert drawn == ["   █", "▁▄██"]
    assert LEVELS[-1] == "█"


# --- charts ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-1e6, 1e6)), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(1, 12),
    st.booleans(),
)
def test_a_canvas_keeps_its_box_whatever_is_drawn(
    points: list[tuple[float, float]], width: int, height: int, connected: bool
) -> None:
    canvas = Canvas(width, height, PlotWindow(-5, 5, -1e5, 1e5))
    canvas.draw(Series([p[0] for p in points], [p[1] for p in points], "train", connected))
    drawn = canvas.lines()
    assert len(drawn) == height and all(width_of(row) == width for row in drawn)


def test_the_corners_of_the_window_are_the_corners_of_the_canvas() -> None:
    canvas = Canvas(2, 1, PlotWindow(0, 1, 0, 1))
    canvas.draw(Series([0, 1], [0, 1], "train", joined=False))
    assert text_of(canvas.lines()[0]) == chr(0x2800 + 0x40) + chr(0x2800 + 0x08)


def test_a_joined_series_has_no_gap() -> None:
    canvas = Canvas(10, 4, PlotWindow(0, 1, 0, 1))
    canvas.draw(Series([0, 1], [0, 1], "train"))
    columns = ["".join(text_of(row)[i] for row in canvas.lines()) for i in range(10)]
    assert all(column.strip() for column in columns)


def dots_of(canvas: Canvas) -> set[tuple[int, int]]:
    """Columns and rows of the dots that are drawn."""
    cells = {
        (column, row): ord(c) - 0x2800
        for row, spans in enumerate(canvas.lines())
        for column, c in enumerate(text_of(spans))
        if c != " "
    }
    return {
        (column * 2 + x, row * 4 + y)
        for (column, row), bits in cells.items()
        for x, y in itertools.product(range(2), range(4))
        if bits & DOTS[x][y]
    }


PLACES = st.lists(st.tuples(st.integers(0, 39), st.integers(0, 31)), min_size=2, max_size=6)


@given(PLACES)
def test_a_line_runs_straight_from_dot_to_dot(places: list[tuple[int, int]]) -> None:
    places.sort()
    canvas = Canvas(20, 8, PlotWindow(0, 39, 0, 31))
    canvas.draw(Series([x for x, _ in places], [31 - y for _, y in places], "train"))
    wanted = {places[0]}
    for (x, y), (to_x, to_y) in itertools.pairwise(places):
        count = max(to_x - x, abs(to_y - y))
        wanted |= {
            (round(x + (to_x - x) * i / count), round(y + (to_y - y) * i / count))
            for i in range(1, count + 1)
        }
    assert dots_of(canvas) == wanted


def test_a_later_series_wins_the_colour_and_marks_win_over_dots() -> None:
    canvas = Canvas(3, 1, PlotWindow(0, 2, 0, 1))
    canvas.draw(Series([0, 1, 2], [0, 0, 0], "train"))
    canvas.draw(Series([0, 1], [0, 0], "smooth"))
    canvas.draw(Series([2], [0], "evaluation", mark="×"))
    assert [role for _, role in canvas.lines()[0]][-1] == "evaluation"
    assert "smooth" in [role for _, role in canvas.lines()[0]]


@given(st.floats(0.01, 1e6), st.floats(1.1, 1e4), st.booleans(), st.floats(0, 1))
def test_heights_and_values_are_inverse(low: float, ratio: float, log: bool, up: float) -> None:
    window = PlotWindow(0, 1, low, low * ratio, log)
    assert window.up(window.value_at(up)) == pytest.approx(up, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(1, 8))
def test_ticks_lie_inside_and_are_evenly_spaced(low: float, span: float, count: int) -> None:
    ticks = rounded_ticks(low, low + span, count)
    slack = span * 1e-6 + 1e-9
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert len(ticks) <= count + 2
    gaps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-3) for gap in gaps)


@given(st.integers(20, 100), st.integers(3, 20), st.integers(2, 40))
def test_a_timeline_keeps_its_box(width: int, height: int, count: int) -> None:
    values = [float(i) for i in range(count)]
    drawn = timeline(values, [Track(values, "device")], width, height, str, mark=3.0)
    assert len(drawn) == height and all(width_of(row) == width for row in drawn)


def test_a_timeline_starts_at_zero_and_leaves_out_what_was_not_measured() -> None:
    drawn = timeline([0, 1, 2], [Track([None, None, None], "device")], 40, 6, str)
    assert not any("⠀" < character <= "⣿" for row in drawn for character in text_of(row))


# --- arrangements ---------------------------------------------------------------------------------

SIZES = [
    (60, 16),
    (60, 18),
    (80, 24),
    (99, 33),
    (100, 34),
    (120, 40),
    (170, 46),
    (200, 60),
    (320, 90),
]
SCREENS = [getattr(arrangement, name) for name in PANEL_SCREENS]


def covered(places: Arrangement, width: int, height: int) -> list[int]:
    counts = [0] * (width * height)
    for place in places.values():
        rect = place.rect
        assert rect.width > 0 and rect.height > 0
        assert rect.x >= 0 and rect.x + rect.width <= width
        assert rect.y >= 0 and rect.y + rect.height <= height, place
        for y in range(rect.y, rect.y + rect.height):
            for x in range(rect.x, rect.x + rect.width):
                counts[y * width + x] += 1
    return counts


@pytest.mark.parametrize("arrange", SCREENS, ids=lambda arrange: arrange.__name__)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_panels_never_overlap_and_leave_at_most_a_gutter(
    arrange: object, width: int, height: int
) -> None:
    assert callable(arrange)
    area = height - 2
    counts = covered(arrange(width, area), width, area)
    assert max(counts) == 1
    assert counts.count(0) <= area  # one column at most


@given(st.integers(60, 300), st.integers(11, 100), st.booleans(), st.booleans())
def test_the_dashboard_fits_at_every_size_below_every_notice(
    width: int, height: int, on_gpu: bool, samples: bool
) -> None:
    places = arrangement.dashboard(width, height, on_gpu=on_gpu, samples=samples)
    assert max(covered(places, width, height)) == 1
    assert ("bus" in places and "moves" in places) == on_gpu or height < 14
    assert "samples" in places or not samples or on_gpu or height < 14


def test_small_terminals_get_the_status_line() -> None:
    assert too_small(59, 16) and too_small(60, 15) and not too_small(60, 16)
