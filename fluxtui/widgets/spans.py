"""Lines of text as spans with a role; a role (not a colour) says what a piece of text means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, get_character_cell_size, set_cell_size

Span = tuple[str, str]  # text, role
Line = tuple[Span, ...]

BLANK: Line = ()
JUMP_CELLS = 8  # a jump of the cursor and a colour take about as many bytes as so much text


def line(*spans: Span | str) -> Line:
    """A line from spans; a bare string has the role "text"."""
    return tuple(("text", span)[::-1] if isinstance(span, str) else span for span in spans)


def width_of(spans: Line) -> int:
    """Cells that the line takes; wide characters take two."""
    return sum(cell_len(text) for text, _ in spans)


def joined(lines: Iterable[Line], gap: str = "  ") -> Line:
    """Several short lines as one, `gap` between those that are not empty."""
    spans: list[Span] = []
    for part in lines:
        if part and spans:
            spans.append((gap, "text"))
        spans.extend(part)
    return tuple(spans)


def fitted(spans: Line, width: int) -> Line:
    """The line in exactly `width` cells: padded, or cut with an ellipsis."""
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


def differing(old: Line, new: Line, width: int) -> list[tuple[int, int]]:
    """From which cells up to which two lines in `width` cells look different.

    Parts between them that cost less to draw again than to jump over are taken in.
    """
    before, after = _cells(fitted(old, width)), _cells(fitted(new, width))
    if before is None or after is None or len(before) != len(after):
        return [(0, width)]
    parts: list[tuple[int, int]] = []
    for x in [x for x, cell in enumerate(before) if cell != after[x]]:
        if parts and x - parts[-1][1] < JUMP_CELLS:
            parts[-1] = (parts[-1][0], x + 1)
        else:
            parts.append((x, x + 1))
    return parts


def _cells(spans: Line) -> list[Span] | None:
    """Character and role of each cell; None where one takes two cells or joins another."""
    cells: list[Span] = []
    for text, role in spans:
        if not text.isascii() and any(get_character_cell_size(c) != 1 for c in text):
            return None
        cells += [(c, role) for c in text]
    return cells


def spread(left: Line, right: Line, width: int) -> Line:
    """Left and right ends in one line; where both do not fit, the left end is cut first."""
    right_width = width_of(right)
    if right_width + 2 > width:
        return fitted(left if left else right, width)
    return (*fitted(left, width - right_width), *right)


def dropped_to_fit(parts: Sequence[Line], width: int, gap: str = "  ") -> Line:
    """As many whole parts, first ones first, as fit in `width`."""
    kept: list[Line] = []
    for part in parts:
        if width_of(joined([*kept, part], gap)) > width:
            continue
        kept.append(part)
    return joined(kept, gap)


def wrapped(text: str, width: int) -> list[str]:
    """Words of `text` in lines of at most `width` cells; longer words are cut."""
    lines: list[str] = []
    current, width = "", max(1, width)
    pieces = (word[i : i + width] for word in text.split() for i in range(0, len(word), width))
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
