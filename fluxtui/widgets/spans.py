"""Lines of text as spans with a role; a role (not a colour) says what a piece of text means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.cells import cell_len, chop_cells, get_character_cell_size, set_cell_size

Span = tuple[str, str]  # text, role
Line = tuple[Span, ...]

BLANK: Line = ()
JUMP_CELLS = 8  # a jump of the cursor and a colour take about as many bytes as so much text


def line(*spans: Span | str) -> Line:
    """Build a line from spans; a bare string has the role "text"."""
    return tuple(("text", span)[::-1] if isinstance(span, str) else span for span in spans)


def width_of(spans: Line) -> int:
    """Return the cells that the line takes; wide characters take two."""
    whole = "".join([text for text, _ in spans])
    if has_a_cell_each(whole):
        return len(whole)
    return sum([len(text) if text.isascii() else cell_len(text) for text, _ in spans])


def joined(lines: Iterable[Line], gap: str = "  ") -> Line:
    """Join short lines into one, with `gap` between lines that are not empty."""
    spans: list[Span] = []
    for part in lines:
        if part and spans:
            spans.append((gap, "text"))
        spans.extend(part)
    return tuple(spans)


def fitted(spans: Line, width: int) -> Line:
    """Pad or cut the line (with an ellipsis) to exactly `width` cells."""
    if width <= 0:
        return BLANK
    used = width_of(spans)
    if used == width:
        return spans
    if used < width:
        return (*spans, (" " * (width - used), "text"))
    kept: list[Span] = []
    room = width - 1
    for text, role in spans:
        length = cell_len(text)
        if length > room:
            kept.append((set_cell_size(text, room) + "…", role))
            return tuple(kept)
        kept.append((text, role))
        room -= length
    return tuple(kept)


def differing(old: Line, new: Line) -> list[tuple[int, int]]:
    """Return the ranges of cells in which two lines of the same width look different.

    Equal parts in between that cost less to draw than to jump over are included.
    """
    before, after = ("".join([text for text, _ in spans]) for spans in (old, new))
    if not (has_a_cell_each(before) and has_a_cell_each(after)):
        return [(0, width_of(new))]
    first = _equal(old, new)
    last = min(_equal(old[::-1], new[::-1]), len(old) - first, len(new) - first)
    start = sum([len(text) for text, _ in old[:first]])
    pairs = zip(
        _cells(old[first : len(old) - last]), _cells(new[first : len(new) - last]), strict=True
    )
    parts: list[tuple[int, int]] = []
    for x in [x for x, (one, other) in enumerate(pairs, start) if one != other]:
        if parts and x - parts[-1][1] < JUMP_CELLS:
            parts[-1] = (parts[-1][0], x + 1)
        else:
            parts.append((x, x + 1))
    return parts


def _equal(some: Line, others: Line) -> int:
    """Count the equal spans at the front."""
    for i, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return i
    return min(len(some), len(others))


def _cells(spans: Line) -> list[Span]:
    """Return character and role of each cell."""
    return [(c, role) for text, role in spans for c in text]


# Not of the scripts and signs of which every character has a cell (Unicode Standard Annex 11)
_UNUSUAL = re.compile(
    r"[^ -~\xa0-\xac\xae-\u02ff\u2013-\u2026\u2190-\u2199\u2500-\u25fc\u2800-\u28ff]"
)


def has_a_cell_each(text: str) -> bool:
    """Tell whether no character takes two cells or joins another."""
    return text.isascii() or _UNUSUAL.search(text) is None or _has_a_cell_each(text)


@lru_cache(maxsize=4096)
def _has_a_cell_each(text: str) -> bool:
    return all(get_character_cell_size(c) == 1 for c in text)


def spread(left: Line, right: Line, width: int) -> Line:
    """Put left and right ends in one line; where both do not fit, the left end is cut first."""
    right_width = width_of(right)
    if right_width + 2 > width:
        return fitted(left if left else right, width)
    return (*fitted(left, width - right_width), *right)


def dropped_to_fit(parts: Sequence[Line], width: int, gap: str = "  ") -> Line:
    """Drop parts from the front until the rest fits in `width`."""
    kept: list[Line] = []
    used = 0
    for part in parts:
        needed = width_of(part) + (len(gap) if kept else 0)
        if part and used + needed <= width:
            kept.append(part)
            used += needed
    return joined(kept, gap)


def cut(text: str, cells: int) -> str:
    """Cut `text` at its end to fit, with an ellipsis where something is missing."""
    if cell_len(text) <= cells:
        return text
    return f"{set_cell_size(text, cells - 1)}…" if cells > 0 else ""


def cut_in_front(text: str, cells: int) -> str:
    """Cut `text` at its front to fit, with an ellipsis where something is missing."""
    if cell_len(text) <= cells:
        return text
    kept = text
    while kept and cell_len(kept) >= cells:
        kept = kept[1:]
    return f"…{kept}"


def _pieces(word: str, width: int) -> list[str]:
    """Cut a word into parts of at most `width` cells; a wider character stands alone."""
    if 2 * len(word) <= width or cell_len(word) <= width:
        return [word]
    return [part for part in chop_cells(word, width) if part]


def wrapped(text: str, width: int) -> list[str]:
    """Wrap the words of `text` in lines of at most `width` cells; longer words are cut."""
    lines: list[str] = []
    current, width = "", max(1, width)
    pieces = (piece for word in text.split() for piece in _pieces(word, width))
    for word in pieces:
        candidate = f"{current} {word}" if current else word
        if current and cell_len(candidate) > width:
            lines.append(current)
            current = word
        else:
            current = candidate
    if current:
        lines.append(current)
    return lines
