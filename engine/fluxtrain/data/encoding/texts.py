"""Encodes texts: special tokens stand once at their borders, and documents' ends are trained on."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.encoding.samples import Sample, sample_of
from fluxtrain.data.encoding.tokenizer import Tokenizer, TokenKinds
from fluxtrain.data.row import Row


class TextEncoder:
    """Encodes rows that hold a text, or a piece of one."""

    def __init__(self, tokenizer: Tokenizer, kinds: TokenKinds) -> None:
        self._end = tokenizer.eos_token_id
        self._kinds = kinds
        self.before, self.behind = added_tokens(kinds)

    def encode(self, rows: Sequence[Row], notes: Notes) -> list[Sample]:
        """Encode texts together, as the tokenizer's threads share them."""
        found = self._kinds.encode([row.text for row in rows])
        return [
            sample_of(row, self.bordered(row, ids, notes)[0])
            for row, ids in zip(rows, found, strict=True)
        ]

    def bordered(self, row: Row, ids: list[int], notes: Notes) -> tuple[list[int], int]:
        """Add the special tokens around a text's tokens that it does not hold already.

        Returns the tokens, and how many were put in front.
        """
        begins = self.before if row.begins else []
        doubled = bool(begins) and ids[: len(begins)] == begins
        added = 0 if doubled else len(begins)
        ids = begins[:added] + ids
        if row.ends:
            ended = self._is_ended(ids)
            doubled |= ended
            if not ended:
                ids = ids + (self.behind or ([] if self._end is None else [self._end]))
                notes.endless += not self.behind and self._end is None
            if (end := self._last(ids)) is not None:
                notes.ends[end] += 1
        notes.doubled += doubled
        return ids, added

    def _is_ended(self, ids: list[int]) -> bool:
        """Return whether the text ends with an end already, white space behind it or not."""
        end = self.behind[-1] if self.behind else self._end
        return end is not None and self._last(ids) == end

    def _last(self, ids: list[int]) -> int | None:
        """Return the last token that is no white space, if it is one that generation stops at."""
        last = len(ids)
        while last and self._kinds.is_blank(ids[last - 1]):
            last -= 1
        return ids[last - 1] if last and self._kinds.ends_a_turn(ids[last - 1]) else None


def added_tokens(kinds: TokenKinds) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds in front of and behind a text."""
    [alone], [whole] = kinds.encode(["a"]), kinds.encode_whole(["a"])
    for at in range(len(whole) - len(alone) + 1):
        if whole[at : at + len(alone)] == alone:
            return whole[:at], whole[at + len(alone) :]
    return [], []
