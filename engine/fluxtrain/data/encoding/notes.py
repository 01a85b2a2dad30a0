"""What was noticed while rows became tokens: what is left out, trained ends, refused rows.

Everything is counted, with the first row it happened to, and can be kept as JSON.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from fluxtrain.data.reading.report import likewise
from fluxtrain.data.rendering.chat_template import DATE
from fluxtrain.data.row import Row
from fluxtrain.errors import BadInput

_NOTED = ("left_out", "within", "refusals")
REASONS = 10  # for which rows became no sample, at most


class SampleRefused(BadInput):
    """A row of the data becomes no sample; its message says why, without the row's place."""


@dataclass(slots=True)
class Noted:
    """How many rows have a peculiarity, and the first one's place."""

    rows: int
    first: str


@dataclass(slots=True)
class Notes:
    """Peculiarities of the rows so far."""

    rows: int = 0
    left_out: dict[str, Noted] = field(default_factory=dict)  # by what a template leaves out
    within: dict[str, Noted] = field(default_factory=dict)  # special tokens in the words of rows
    ends: Counter[int] = field(default_factory=Counter)  # by the token that ends trained answers
    added_ends: int = 0  # answers behind which the template puts no end
    endless: int = 0  # texts whose end cannot be trained on, as the tokenizer has none
    doubled: int = 0  # texts that begin or end with a special token that the tokenizer adds
    dated: int = 0  # conversations in which a fixed date stands for today's
    refused: int = 0  # rows without a sample
    refusals: dict[str, Noted] = field(default_factory=dict)  # by reason

    def leaves_out(self, row: Row, names: set[str]) -> None:
        """Count the parts of `row` that its rendering lacks."""
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
        if (reason := str(error)) in self.refusals or len(self.refusals) < REASONS:
            self.refusals.setdefault(reason, Noted(0, str(row.origin))).rows += 1

    def refused_rows(self) -> list[str]:
        """Return the reasons, each with the first row that was refused for it."""
        return [f"{n.first}: {reason}{likewise(n.rows)}" for reason, n in self.refusals.items()]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a manifest."""
        kept = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in _NOTED:
            kept[name] = {what: [one.rows, one.first] for what, one in kept[name].items()}
        return {**kept, "ends": {str(token): count for token, count in self.ends.items()}}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Notes:
        """Read the result of `as_json`."""
        noted = {name: {what: Noted(*one) for what, one in kept[name].items()} for name in _NOTED}
        ends = Counter({int(token): count for token, count in kept["ends"].items()})
        return cls(**{**kept, **noted, "ends": ends})

    def sentences(self) -> list[str]:
        """Return the notes for a person, a sentence each."""
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
                "not trained on: set eos_token in its tokenizer_config.json"
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
            told.append(f"{_rows(self.refused)} are left out (first: {self.refused_rows()[0]})")
        return told


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
