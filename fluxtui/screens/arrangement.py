"""Places the panels of each screen. Pure: from a size to rectangles that cover the area."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Frame = Literal["box", "rule", "bare"]  # a border; a titled line above; nothing

SMALLEST = (60, 20)  # below this one status line says it all
BOXED = (100, 34)  # from here on there is room for borders
THREE_COLUMNS = (170, 46)
SMALL_CHARTS_FROM_ROWS = 30
READOUT_ROWS = 4
STEPS_FROM_ROWS = 32
LANES_ROWS = 12  # with its frame: six lanes, times, letters, waits, bound
TALL_LANES_FROM_ROWS = 50
TALL_LANES_ROWS = 17  # each lane two rows high
LANES_ON_DASHBOARD_FROM_ROWS = 36
CATEGORY_ROWS = 15
BLOCK_ROWS = 9


class Rect(NamedTuple):
    """Cells: left, top, width, height."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a panel and its frame."""

    rect: Rect
    frame: Frame


Arrangement = Mapping[str, Place]


def too_small(width: int, height: int) -> bool:
    """Return whether the terminal has room for the status line alone."""
    return width < SMALLEST[0] or height < SMALLEST[1]


def dashboard(width: int, height: int) -> Arrangement:
    """The dashboard in an area of the screen's width, without header and footer."""
    screen_height = height + 2
    if width >= THREE_COLUMNS[0] and screen_height >= THREE_COLUMNS[1]:
        return _three_columns(width, height)
    if width >= BOXED[0] and screen_height >= BOXED[1]:
        return _two_columns(width, height)
    return _compact(width, height)


def _compact(width: int, height: int) -> Arrangement:
    """Ruled rows; the loss and the moves share what is left."""
    left = width * 52 // 100
    fixed = 2 + 2 + 4 + 3 + 2 + 1
    middle = height - fixed
    y = 0
    places: dict[str, Place] = {}
    for name, rows, frame in (
        ("progress", 2, "bare"), ("memory", 2, "rule"), ("residency", 4, "rule"),
        ("bus", 2, "rule"), ("machine", 1, "bare"),
    ):  # fmt: skip
        places[name] = Place(Rect(0, y, width, rows), frame)  # type: ignore[arg-type]
        y += rows
    places["loss"] = Place(Rect(0, y, left, middle), "rule")
    places["moves"] = Place(Rect(left + 1, y, width - left - 1, middle), "rule")
    y += middle
    places["step"] = Place(Rect(0, y, width, 2), "rule")
    places["log"] = Place(Rect(0, y + 2, width, 1), "bare")
    return places


def _two_columns(width: int, height: int) -> Arrangement:
    """Place boxes: full-width facts on top, charts and lists in two columns, the step below."""
    left = width * 61 // 100
    right = width - left
    foot, rows = _foot(height)
    rest = height - (4 + 5 + 5 + rows)
    low = max(6, rest * 7 // 20)
    high = rest - low
    bus = min(high - 6, 8) if high >= 14 else high - 6
    machine = high - bus
    y = 14
    return {
        "progress": Place(Rect(0, 0, width, 4), "box"),
        "memory": Place(Rect(0, 4, width, 5), "box"),
        "residency": Place(Rect(0, 9, width, 5), "box"),
        "loss": Place(Rect(0, y, left, high), "box"),
        "bus": Place(Rect(left, y, right, bus), "box"),
        "machine": Place(Rect(left, y + bus, right, machine), "box"),
        "moves": Place(Rect(0, y + high, left, low), "box"),
        "log": Place(Rect(left, y + high, right, low), "box"),
        foot: Place(Rect(0, height - rows, width, rows), "box"),
    }


def _foot(height: int) -> tuple[str, int]:
    """Return the panel of the last step and its rows: lanes if there is room, else phases."""
    return ("lanes", 7) if height >= LANES_ON_DASHBOARD_FROM_ROWS else ("step", 4)


def _three_columns(width: int, height: int) -> Arrangement:
    """Place as in two columns, with advice beside the blocks and the log in its own column."""
    left = width * 60 // 100
    right = width - left
    foot, rows = _foot(height)
    rest = height - (4 + 5 + 5 + rows)
    low = rest * 2 // 5
    high = rest - low
    y = 14
    third = left * 55 // 100
    return {
        "progress": Place(Rect(0, 0, width, 4), "box"),
        "memory": Place(Rect(0, 4, width, 5), "box"),
        "residency": Place(Rect(0, 9, left, 5), "box"),
        "machine": Place(Rect(left, 9, right, 5), "box"),
        "loss": Place(Rect(0, y, left, high), "box"),
        "bus": Place(Rect(left, y, right, high // 2), "box"),
        "advice": Place(Rect(left, y + high // 2, right, high - high // 2), "box"),
        "moves": Place(Rect(0, y + high, third, low), "box"),
        "log": Place(Rect(third, y + high, width - third, low), "box"),
        foot: Place(Rect(0, height - rows, width, rows), "box"),
    }


def memory(width: int, height: int) -> Arrangement:
    """The bar on top, history beside the categories and one block, all blocks below.

    Where it is low the categories give way: the bar names them too.
    """
    left = width * (62 if width >= BOXED[0] else 54) // 100
    right = width - left
    middle = height - 5 - 5
    table = CATEGORY_ROWS if middle >= CATEGORY_ROWS + BLOCK_ROWS else 0
    places = {
        "memory": Place(Rect(0, 0, width, 5), "box"),
        "memory_history": Place(Rect(0, 5, left, middle), "box"),
        "block": Place(Rect(left, 5 + table, right, middle - table), "box"),
        "residency": Place(Rect(0, 5 + middle, width, 5), "box"),
    }
    if table:
        places["categories"] = Place(Rect(left, 5, right, table), "box")
    return places


def transfer(width: int, height: int) -> Arrangement:
    """Rates beside stalls, the lanes of a step, and where there is room the steps and moves."""
    left = width * 62 // 100
    middle = LANES_ROWS if height < TALL_LANES_FROM_ROWS else TALL_LANES_ROWS
    low = (height - middle) // 2 if height >= STEPS_FROM_ROWS else 0
    high = height - middle - low
    places = {
        "rates": Place(Rect(0, 0, left, high), "box"),
        "stalls": Place(Rect(left, 0, width - left, high), "box"),
        "lanes": Place(Rect(0, high, width, middle), "box"),
    }
    if low:
        places["recent_steps"] = Place(Rect(0, high + middle, left, low), "box")
        places["moves"] = Place(Rect(left, high + middle, width - left, low), "box")
    return places


def loss(width: int, height: int, *, samples: bool = False) -> Arrangement:
    """The loss with its readout when low, else with two small charts below.

    With `samples`, the answers to prompts stand beside the loss, or below it where it is narrow.
    """
    low = 9 if height >= SMALL_CHARTS_FROM_ROWS else 0
    chart = height - READOUT_ROWS - low
    places = {
        "loss": Place(Rect(0, 0, width, chart), "box"),
        "readout": Place(Rect(0, chart, width, READOUT_ROWS), "box"),
    }
    if samples and width >= BOXED[0]:
        left = width * 58 // 100
        places["loss"] = Place(Rect(0, 0, left, chart), "box")
        places["samples"] = Place(Rect(left, 0, width - left, chart), "box")
    elif samples:
        rows = max(4, chart * 2 // 5)
        places["loss"] = Place(Rect(0, 0, width, chart - rows), "box")
        places["samples"] = Place(Rect(0, chart - rows, width, rows), "box")
    if low:
        half = width // 2
        places["grad_norm"] = Place(Rect(0, height - low, half, low), "box")
        places["learning_rate"] = Place(Rect(half, height - low, width - half, low), "box")
    return places
