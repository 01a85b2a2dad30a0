"""Places the panels of each screen. Pure: from a size to rectangles that cover the area."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Frame = Literal["box", "rule", "bare"]  # a border; a titled line above; nothing

SMALLEST = (60, 16)  # below this one status line says it all
WHOLE_ROWS = 18  # of an area; a lower one leaves out what is least asked for
BOXED = (100, 34)  # from here on there is room for borders
THREE_COLUMNS = (170, 46)
SMALL_CHARTS_FROM_ROWS = 30
READOUT_ROWS = 4
STEPS_FROM_ROWS = 32
LEAST_RATES_ROWS = 5
MACHINE_ROWS = 6
LANES_ROWS = 12  # with its frame: six lanes, times, letters, waits, bound
TALL_LANES_FROM_ROWS = 50
TALL_LANES_ROWS = 17  # each lane two rows high
LANES_ON_DASHBOARD_FROM_ROWS = 36
FEW_CARDS = 4  # each with a line of its own where there is room
CATEGORY_ROWS = 15
BLOCK_ROWS = 9


class Rect(NamedTuple):
    """Cells: left, top, width, height."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PanelPlace:
    """The place of a panel and its frame."""

    rect: Rect
    frame: Frame


Arrangement = Mapping[str, PanelPlace]


def too_small(width: int, height: int) -> bool:
    """Return whether the terminal has room for the status line alone."""
    return width < SMALLEST[0] or height < SMALLEST[1]


def dashboard(
    width: int, height: int, *, cards: int = 1, on_gpu: bool = True, samples: bool = False
) -> Arrangement:
    """Arrange the dashboard in an area of the screen's width, without header and footer.

    Several `cards` each get a line or column in their own panel, in place of the memory's. A run
    on the processor alone copies nothing over a bus: `samples` replace its moves, else a wider
    log.
    """
    screen_height = height + 2
    second = "moves" if on_gpu else "samples" if samples else ""
    if width >= THREE_COLUMNS[0] and screen_height >= THREE_COLUMNS[1]:
        return _three_columns(width, height, cards, second)
    if width >= BOXED[0] and screen_height >= BOXED[1]:
        return _two_columns(width, height, cards, second)
    return _compact(width, height, cards, second)


def _memory_rows(cards: int, most: int) -> tuple[str, int]:
    """Return the panel that shows the memory, and its lines: one a card, `most` at most."""
    return ("memory", 1) if cards == 1 else ("cards", min(cards, most))


def _low_rows(cards: int) -> int:
    """Return the lines for so many cards on a low screen, where columns must not get too narrow."""
    return 2 if cards <= FEW_CARDS else 3


def _compact(width: int, height: int, cards: int, second: str) -> Arrangement:
    """Arrange ruled rows; the loss and the `second` panel share the rest."""
    left = width * 52 // 100
    memory, lines = _memory_rows(cards, _low_rows(cards))
    blocks = 4 + (cards > 1)
    is_whole = height >= WHOLE_ROWS
    copies, machine, foot = 2 * (second == "moves"), int(is_whole), 2 * is_whole
    middle = height - (2 + 1 + lines + blocks + copies + machine + foot + bool(second))
    y = 0
    places: dict[str, PanelPlace] = {}
    for name, rows, frame in (
        ("progress", 2, "bare"), (memory, 1 + lines, "rule"), ("residency", blocks, "rule"),
        ("bus", copies, "rule"), ("machine", machine, "bare"),
    ):  # fmt: skip
        if rows:
            places[name] = PanelPlace(Rect(0, y, width, rows), frame)  # type: ignore[arg-type]
        y += rows
    if middle > 0:
        places["loss"] = PanelPlace(Rect(0, y, left, middle), "rule")
        places[second or "log"] = PanelPlace(Rect(left + 1, y, width - left - 1, middle), "rule")
        y += middle
    if foot:
        places["step"] = PanelPlace(Rect(0, y, width, foot), "rule")
    if second:
        places["log"] = PanelPlace(Rect(0, y + foot, width, 1), "bare")
    return places


def _two_columns(width: int, height: int, cards: int, second: str) -> Arrangement:
    """Arrange boxes: full-width facts on top, charts and lists in two columns, the step below."""
    left = width * 61 // 100
    right = width - left
    foot, rows = _foot(height)
    memory, lines = _memory_rows(cards, FEW_CARDS)
    first = max(5, 3 + lines)
    blocks = 5 + (cards > 1)
    y = 4 + first + blocks
    rest = height - (y + rows)
    low = max(6, rest * 7 // 20)
    high = rest - low
    bus = min(high - 6, 8) if high >= 14 else max(4 if cards > 1 else 0, high - 6)
    places = {
        "progress": PanelPlace(Rect(0, 0, width, 4), "box"),
        memory: PanelPlace(Rect(0, 4, width, first), "box"),
        "residency": PanelPlace(Rect(0, 4 + first, width, blocks), "box"),
        foot: PanelPlace(Rect(0, height - rows, width, rows), "box"),
    }
    column = {"bus": bus, "machine": high - bus}
    if second == "moves":
        places["moves"] = PanelPlace(Rect(0, y + high, left, low), "box")
        column["log"] = low
    else:
        high = rest
        others = rest - MACHINE_ROWS
        samples = others * 3 // 5 if second else 0
        column = {"machine": MACHINE_ROWS, "samples": samples, "log": others - samples}
    places["loss"] = PanelPlace(Rect(0, y, left, high), "box")
    for name, size in column.items():
        if size:
            places[name] = PanelPlace(Rect(left, y, right, size), "box")
        y += size
    return places


def _foot(height: int) -> tuple[str, int]:
    """Return the panel of the last step and its rows: lanes if they fit, else phases."""
    return ("lanes", 7) if height >= LANES_ON_DASHBOARD_FROM_ROWS else ("step", 4)


def _three_columns(width: int, height: int, cards: int, second: str) -> Arrangement:
    """Arrange like two columns, with advice next to the blocks and the log in a third."""
    left = width * 60 // 100
    right = width - left
    foot, rows = _foot(height)
    memory, lines = _memory_rows(cards, FEW_CARDS)
    first = max(5, 3 + lines)
    blocks = 5 + (cards > 1)
    y = 4 + first + blocks
    rest = height - (y + rows)
    low = rest * 2 // 5
    high = rest - low
    third = left * 55 // 100 if second else 0
    bus = high // 2 if second == "moves" else 0
    return {
        "progress": PanelPlace(Rect(0, 0, width, 4), "box"),
        memory: PanelPlace(Rect(0, 4, width, first), "box"),
        "residency": PanelPlace(Rect(0, 4 + first, left, blocks), "box"),
        "machine": PanelPlace(Rect(left, 4 + first, right, blocks), "box"),
        "loss": PanelPlace(Rect(0, y, left, high), "box"),
        **({"bus": PanelPlace(Rect(left, y, right, bus), "box")} if bus else {}),
        "advice": PanelPlace(Rect(left, y + bus, right, high - bus), "box"),
        **({second: PanelPlace(Rect(0, y + high, third, low), "box")} if second else {}),
        "news": PanelPlace(Rect(third, y + high, width - third, low), "box"),
        foot: PanelPlace(Rect(0, height - rows, width, rows), "box"),
    }


def memory(width: int, height: int, *, cards: int = 1) -> Arrangement:
    """Put the bar (one for each card) on top, history next to the categories and one block, all
    blocks below. A low screen drops the categories: the bar names them too."""
    left = width * (62 if width >= BOXED[0] else 54) // 100
    right = width - left
    _, lines = _memory_rows(cards, FEW_CARDS if height >= BOXED[1] else _low_rows(cards))
    first, last = 4 + lines, 5 + (cards > 1)
    middle = height - first - last
    table = CATEGORY_ROWS if middle >= CATEGORY_ROWS + BLOCK_ROWS else 0
    places = {
        "memory" if cards == 1 else "card_memory": PanelPlace(Rect(0, 0, width, first), "box"),
        "memory_history": PanelPlace(Rect(0, first, left, middle), "box"),
        "block": PanelPlace(Rect(left, first + table, right, middle - table), "box"),
        "residency": PanelPlace(Rect(0, first + middle, width, last), "box"),
    }
    if table:
        places["categories"] = PanelPlace(Rect(left, first, right, table), "box")
    return places


def transfer(width: int, height: int, *, cards: int = 1) -> Arrangement:
    """Put rates next to stalls, then the lanes of a step and, where they fit, the steps
    and moves."""
    left = width * 62 // 100
    middle = LANES_ROWS if height < TALL_LANES_FROM_ROWS else TALL_LANES_ROWS
    middle = min(middle, height - LEAST_RATES_ROWS)
    if cards > 1:  # three lanes a card, two of the host, four lines below them, the frame
        middle = max(LANES_ROWS, min(3 * cards + 8, height * 3 // 5))
    low = (height - middle) // 2 if height >= STEPS_FROM_ROWS else 0
    high = height - middle - low
    places = {
        "rates": PanelPlace(Rect(0, 0, left, high), "box"),
        "stalls": PanelPlace(Rect(left, 0, width - left, high), "box"),
        "lanes": PanelPlace(Rect(0, high, width, middle), "box"),
    }
    if low:
        places["recent_steps"] = PanelPlace(Rect(0, high + middle, left, low), "box")
        places["moves"] = PanelPlace(Rect(left, high + middle, width - left, low), "box")
    return places


def loss(width: int, height: int, *, samples: bool = False) -> Arrangement:
    """Arrange the loss with its readout when low, else with two small charts below. With
    `samples`, the answers to prompts stand next to the loss, or below it where it is narrow."""
    low = 9 if height >= SMALL_CHARTS_FROM_ROWS else 0
    chart = height - READOUT_ROWS - low
    places = {
        "loss": PanelPlace(Rect(0, 0, width, chart), "box"),
        "readout": PanelPlace(Rect(0, chart, width, READOUT_ROWS), "box"),
    }
    if samples and width >= BOXED[0]:
        left = width * 58 // 100
        places["loss"] = PanelPlace(Rect(0, 0, left, chart), "box")
        places["samples"] = PanelPlace(Rect(left, 0, width - left, chart), "box")
    elif samples:
        rows = max(4, chart * 2 // 5)
        places["loss"] = PanelPlace(Rect(0, 0, width, chart - rows), "box")
        places["samples"] = PanelPlace(Rect(0, chart - rows, width, rows), "box")
    if low:
        half = width // 2
        places["grad_norm"] = PanelPlace(Rect(0, height - low, half, low), "box")
        places["learning_rate"] = PanelPlace(Rect(half, height - low, width - half, low), "box")
    return places
