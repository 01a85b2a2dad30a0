"""What was noticed while rows became tokens: what is left out, which ends are learnt, refused rows.

Everything is counted, with the first row it happened to, and can be kept as JSON.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fluxtrain.data.rendering.chat_template import DATE
from fluxtrain.data.row import Row
from fluxtrain.errors import BadInput

REFUSED_SHOWN = 20  # of the rows without a sample, how many keep their reason


class RowRefused(BadInput):
    """A row of the data becomes no sample; its message says why, without the row's place."""


@dataclass(slots=True)
class Noted:
    """How many rows something was noticed in, and the first one's place."""

    rows: int
    first: str


@dataclass(slots=True)
class Notes:
    """What was noticed in the rows so far."""

    rows: int = 0
    left_out: dict[str, Noted] = field(default_factory=dict)  # by what a template leaves out
    within: dict[str, Noted] = field(default_factory=dict)  # special tokens in the words of rows
    ends: Counter[int] = field(default_factory=Counter)  # by the token that ends learnt answers
    added_ends: int = 0  # answers behind which the template puts no end
    endless: int = 0  # texts whose end cannot be learnt, as the tokenizer has none
    doubled: int = 0  # texts that begin or end with a special token that the tokenizer adds
    dated: int = 0  # conversations in which a fixed date stands for today's
    refused: int = 0  # rows without a sample
    refusals: list[str] = field(default_factory=list)  # of the first REFUSED_SHOWN, with place

    def leaves_out(self, row: Row, names: set[str]) -> None:
        """Count what the rendering of `row` lacks."""
        for name in sorted(names):
            noted = self.left_out.setdefault(name, Noted(0, str(row.origin)))
            noted.rows += 1

    def holds(self, row: Row, tokens: set[str]) -> None:
        """Count special tokens that stand in the words of `row` themselves."""
        for token in sorted(tokens):
            self.within.setdefault(token, Noted(0, str(row.origin))).rows += 1

    def refuse(self, row: Row, error: Exception) -> None:
        """Count a row that becomes no sample."""
        self.refused += 1
        if len(self.refusals) < REFUSED_SHOWN:
            self.refusals.append(f"{row.origin}: {error}")

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a manifest."""
        return {
            "rows": self.rows,
            "left_out": _plain(self.left_out),
            "within": _plain(self.within),
            "ends": {str(token): count for token, count in self.ends.items()},
            "added_ends": self.added_ends,
            "endless": self.endless,
            "doubled": self.doubled,
            "dated": self.dated,
            "refused": self.refused,
            "refusals": list(self.refusals),
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Notes:
        """Read what `as_json` made."""
        return cls(
            rows=kept["rows"],
            left_out={name: Noted(*noted) for name, noted in kept["left_out"].items()},
            within={name: Noted(*noted) for name, noted in kept["within"].items()},
            ends=Counter({int(token): count for token, count in kept["ends"].items()}),
            added_ends=kept["added_ends"],
            endless=kept["endless"],
            doubled=kept["doubled"],
            dated=kept["dated"],
            refused=kept["refused"],
            refusals=list(kept["refusals"]),
        )

    def sentences(self) -> list[str]:
        """Return what a person should be told, a sentence each."""
        told = [
            f"the chat template leaves out {name} of {_rows(noted.rows)} (first: {noted.first})"
            for name, noted in sorted(self.left_out.items())
        ]
        told += [
            f"{_rows(noted.rows)} {'holds' if noted.rows == 1 else 'hold'} {token} in the words, "
            f"which the tokenizer takes for its special token (first: {noted.first}): remove it "
            "unless it is meant"
            for token, noted in sorted(self.within.items(), key=lambda one: -one[1].rows)[:3]
        ]
        if self.added_ends:
            told.append(
                f"the chat template puts no end behind an answer: the tokenizer's own end of "
                f"sequence was added behind each of {self.added_ends:,} answers, and every answer "
                "is a sample of its own; set data.chat_template for one that ends turns"
            )
        if self.endless:
            told.append(
                f"the tokenizer has no end of sequence, so the end of {self.endless:,} texts is "
                "not learnt: set eos_token in its tokenizer_config.json"
            )
        if self.doubled:
            told.append(
                f"{self.doubled:,} texts hold the special token themselves that the tokenizer adds "
                "around a text: it stands there once"
            )
        if self.dated:
            told.append(
                f"the chat template prints today's date: {self.dated:,} conversations have "
                f"{DATE:%-d %B %Y} in its place, so that they are the same on every day"
            )
        if self.refused:
            told.append(f"{_rows(self.refused)} are left out (first: {self.refusals[0]})")
        return told


def _plain(noted: dict[str, Noted]) -> dict[str, list[Any]]:
    return {name: [one.rows, one.first] for name, one in noted.items()}


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
