"""Where each block's weights, gradients and optimizer state are: a letter (and colour) a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.card_colours import card_of, letter_of, role_of
from fluxtui.panels.panel import Panel, stale_note
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line, Span, dropped_to_fit, fitted, line, spread
from fluxtui.words import counted

ROLES = {"G": "device", "C": "host", "N": "disk", ">": "flight", "<": "flight", ".": "absent"}
CLASSES = ("weights", "gradients", "optimizer")
LABEL_CELLS = 11
TALLY_CELLS = 33
WIDEST_TILE = 9


def heading(view: View, width: int) -> Line:
    """Say how many blocks there are, and what the letters mean."""
    sample = view.fresh(view.state.residency)
    if sample is None:
        return stale_note(view.age_s(view.state.residency))
    count = len(sample.weights)
    legend: Line = tuple(
        span
        for letter, word in (("G", "device"), ("C", "host"), ("N", "disk"))
        for span in ((letter, ROLES[letter]), (f" {word}  ", "dim"))
    )
    flight: Line = ((">", "flight"), (" in  ", "dim"), ("<", "flight"), (" out", "dim"))
    kinds = weights_apart(sample.weights_bytes, sample.frozen_bytes, sample.packed_bytes)
    parts: list[Line] = [((counted(count, "block"), "text"),), *kinds, (*legend, *flight)]
    return dropped_to_fit(parts, width)


def weights_apart(whole: int | None, frozen: int, packed: int) -> list[Line]:
    """Return trained, packed and frozen bytes of weights; nothing where all are trained."""
    if whole is None or not (frozen or packed):
        return []
    kinds = (("trained", whole - frozen - packed), ("packed", packed), ("frozen", frozen))
    return [((f"{name} ", "dim"), (bytes_text(size), "text")) for name, size in kinds if size]


def body(view: View, width: int, height: int) -> list[Line]:
    """Return a row a class: the map, then the blocks and bytes in each place."""
    sample = view.fresh(view.state.residency)
    if sample is None:
        labels = [f" {name:<{LABEL_CELLS - 2}} " for name in CLASSES[:height]]
        return [line((label, "dim"), (UNKNOWN, "dim")) for label in labels]
    rows = (
        ("weights", sample.weights, sample.weights_bytes),
        ("gradients", sample.gradients, sample.gradients_bytes),
        ("optimizer", sample.optimizer, sample.optimizer_bytes),
    )
    room = width - LABEL_CELLS - TALLY_CELLS
    lines: list[Line] = [_cards_line(sample.cards, width, room)] if sample.cards else []
    for name, letters, size_bytes in rows:
        chosen = view.chart.block
        left: Line = ((f" {name:<{LABEL_CELLS - 2}} ", "dim"), *tiles(letters, room, chosen))
        lines.append(spread(left, _tally(letters, size_bytes), width))
    return lines[:height]


def _cards_line(cards: str, width: int, room: int) -> Line:
    """Return the card of each block, above the block's letters, and how many each card has."""
    numbers = [card_of(letter) for letter in cards]
    left: Line = ((f" {'card':<{LABEL_CELLS - 2}} ", "dim"), *card_tiles(numbers, room))
    counts = Counter(numbers)
    parts: list[Line] = [
        ((letter_of(card), role_of(card)), (f":{counts[card]}", "text")) for card in sorted(counts)
    ]
    right = dropped_to_fit(parts, TALLY_CELLS - 2, gap=" ")
    return spread(left, fitted(right, TALLY_CELLS - 1), width)


def card_tiles(numbers: Sequence[int], room: int) -> Line:
    """Return a tile a block with its card, exactly above the tiles of `tiles`."""
    if not numbers or room <= 0:
        return ((UNKNOWN, "dim"),)
    if len(numbers) > room:  # several blocks share a tile
        size = -(-len(numbers) // room)
        shared = (set(numbers[i : i + size]) for i in range(0, len(numbers), size))
        return tuple(
            (letter_of(one), role_of(one)) if len(few) == 1 else ("·", "dim")
            for few in shared
            for one in [min(few)]
        )
    cells = tile_cells(len(numbers), room)
    if cells == 1:
        return tuple((letter_of(one), role_of(one)) for one in numbers)
    return tuple(
        span
        for one in numbers
        for span in ((letter_of(one).center(cells - 1), f"tile:{role_of(one)}"), (" ", "text"))
    )


def tiles(letters: str, room: int, chosen: int | None = None) -> Line:
    """Return the letters as coloured tiles, as wide as fits; without room several share a tile.

    The chosen block's tile is marked.
    """
    if not letters or room <= 0:
        return ((UNKNOWN, "dim"),)
    if len(letters) > room:
        size = -(-len(letters) // room)
        letters = "".join(_majority(letters[i : i + size]) for i in range(0, len(letters), size))
        return (*_plain(letters), (f" ×{size}", "dim"))
    cells = tile_cells(len(letters), room)
    if cells == 1:
        return _plain(letters, chosen)
    spans: list[Span] = []
    for i, letter in enumerate(letters):
        role = "absent" if letter == "." else f"tile:{ROLES.get(letter, 'absent')}"
        spans.append((letter.center(cells - 1), "selected" if i == chosen else role))
        spans.append((" ", "text"))
    return tuple(spans)


def tile_cells(count: int, room: int) -> int:
    """Return the width of a block's tile: one cell without a gap, or three and more with one."""
    cells = min(WIDEST_TILE, room // max(1, count))
    return cells if cells >= 3 else 1


def pick(view: View, width: int, height: int, x: int, y: int) -> ChartSettings | None:
    """Select the block under the pointer."""
    sample = view.fresh(view.state.residency)
    room = width - LABEL_CELLS - TALLY_CELLS
    if sample is None or not 0 < len(sample.weights) <= room or x < LABEL_CELLS:
        return None
    at = (x - LABEL_CELLS) // tile_cells(len(sample.weights), room)
    return replace(view.chart, block=at) if at < len(sample.weights) else None


def _plain(letters: str, chosen: int | None = None) -> Line:
    spans: list[Span] = []
    for i, letter in enumerate(letters):
        role = "selected" if i == chosen else ROLES.get(letter, "absent")
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + letter, role)
        else:
            spans.append((letter, role))
    return tuple(spans)


def _majority(letters: str) -> str:
    return Counter(letters).most_common(1)[0][0]


def _tally(letters: str, size_bytes: int) -> Line:
    counts = Counter(letters)
    spans: list[Span] = []
    for letter in "GCN":
        role = ROLES[letter] if counts[letter] else "absent"
        spans.append((f"{letter}{counts[letter]:<3} ", role))
    moving = counts[">"] + counts["<"]
    spans.append((f"⇅{moving:<3} ", "flight" if moving else "absent"))
    return (*spans, (f"{bytes_text(size_bytes):>10}", "text"))


PANEL = Panel(
    "residency",
    "Blocks",
    body,
    heading,
    about="where each block's tensors are: G device, C host",
    pick=pick,
)
