"""Encodes texts in calls of bounded size: a fast tokenizer takes some 250 bytes a character.

A long text is cut before white space (or behind a full stop of Chinese or Japanese), at a place
that no token reaches across: what follows does not change the tokens of the context before it. Each
piece is encoded behind that context, whose tokens are dropped, so the tokens are those of the whole
text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fluxtrain.errors import BadInput

PIECE_CHARACTERS = 256 << 10
AT_ONCE_CHARACTERS = 1 << 20
MOST_CHARACTERS = 1 << 20  # from one place to the next
LARGEST_CHARACTERS = 8 << 20  # of one conversation, as it is rendered
_CONTEXT = 256  # characters on both sides of a place that decide its tokens
_TRIES = 16
_STOPS = "。！？；"

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a text: where it begins, in characters and in tokens, and its tokens."""

    start: int
    first: int
    ids: list[int]


def encode_bounded(texts: Sequence[str], encode: Encode) -> list[list[int]]:
    """Return what `encode` gives of texts, which it gets in bounded calls, long ones in pieces.

    Raises BadInput for a long text without a place to cut it.
    """
    found: list[list[int]] = []
    for group in _groups(texts):
        if len(group[0]) > PIECE_CHARACTERS:
            found.append([token for piece in pieces(group[0], encode) for token in piece.ids])
        else:
            found += encode(group)
    return found


def too_long(text: str) -> str:
    """Say why a text cannot be encoded in bounded memory; "" if it can."""
    if why := too_large(len(text)):
        return why
    start = 0
    while len(text) - start > MOST_CHARACTERS:
        place = next(_candidates(text, start), 0)
        if not place:
            return (
                f"it has {MOST_CHARACTERS:,} characters without white space behind its character "
                f"{start:,}, where it could be encoded in pieces"
            )
        start = place
    return ""


def too_large(characters: int) -> str:
    """Say that a text or a conversation has too many characters; "" if it has not."""
    if characters <= LARGEST_CHARACTERS:
        return ""
    return f"it has {characters:,} characters, and at most {LARGEST_CHARACTERS:,} can be encoded"


def pieces(text: str, encode: Encode) -> Iterator[Piece]:
    """Yield the pieces of a text with their tokens. Raises BadInput as `encode_bounded` does."""
    start = first = 0
    while start < len(text) or not start:
        end = len(text) if len(text) - start <= PIECE_CHARACTERS else _place(text, start, encode)
        ids = _behind_context(text, start, end, encode)
        if ids is None:
            raise _nowhere(text, start)
        yield Piece(start, first, ids)
        start, first = end, first + len(ids)
        if not text:
            return


def common_lengths(
    text: str, places: Sequence[int], whole: list[int], encode: Encode
) -> list[tuple[int, bool]]:
    """Encode a text up to each of its places; return how many tokens it has in common with those of
    the `whole`, and whether that is all of them."""
    if len(text) <= PIECE_CHARACTERS:
        prefixes = [text[:place] for place in places]
        return [_common(ids, whole) for group in _groups(prefixes) for ids in encode(group)]
    begun = list(pieces(text, encode))
    starts = [piece.start for piece in begun]
    found = []
    for place in places:
        piece = begun[bisect_right(starts, place) - 1]
        ids = _behind_context(text, piece.start, place, encode)
        same, is_all = _common(ids or [], piece.ids)
        found.append((piece.first + same, is_all and ids is not None))
    return found


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts in groups of bounded size; a long one is a group of its own."""
    group: list[str] = []
    characters = 0
    for text in texts:
        is_long = len(text) > PIECE_CHARACTERS
        if group and (is_long or characters + len(text) > AT_ONCE_CHARACTERS):
            yield group
            group, characters = [], 0
        if is_long:
            yield [text]
            continue
        group.append(text)
        characters += len(text)
    if group:
        yield group


def _place(text: str, start: int, encode: Encode) -> int:
    """Return where the piece ends that begins at `start`."""
    for tried, place in enumerate(_candidates(text, start)):
        before = text[max(start, place - _CONTEXT) : place]
        alone, beside = encode([before, before + text[place : place + _CONTEXT]])
        if beside[: len(alone)] == alone:
            return place
        if tried == _TRIES:
            break
    raise _nowhere(text, start)


def _candidates(text: str, start: int) -> Iterator[int]:
    """Yield places where a piece from `start` may end, the largest within a piece first."""
    usual, most = start + PIECE_CHARACTERS, min(len(text) - 1, start + MOST_CHARACTERS)
    for place in range(min(usual, most), start + PIECE_CHARACTERS // 2, -1):
        if _may_cut(text, place):
            yield place
    for place in range(usual + 1, most):
        if _may_cut(text, place):
            yield place


def _may_cut(text: str, place: int) -> bool:
    before, behind = text[place - 1], text[place]
    return (behind.isspace() and not before.isspace()) or before in _STOPS


def _behind_context(text: str, start: int, end: int, encode: Encode) -> list[int] | None:
    """Encode a piece behind what stands before it; None where they share a token."""
    if not start:
        return encode([text[:end]])[0]
    before = text[max(0, start - _CONTEXT) : start]
    alone, beside = encode([before, before + text[start:end]])
    return beside[len(alone) :] if beside[: len(alone)] == alone else None


def _common(ids: list[int], whole: list[int]) -> tuple[int, bool]:
    same = next(
        (at for at, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b),
        min(len(ids), len(whole)),
    )
    return same, same == len(ids)


def _nowhere(text: str, start: int) -> BadInput:
    return BadInput(
        f"a text of {len(text):,} characters has no place behind its character {start:,} where the "
        "tokenizer could go on by itself: cut it in the data"
    )
