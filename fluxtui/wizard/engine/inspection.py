"""The data as the model will see it, read from `fluxtrain inspect --json`; and its histogram."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fluxtrain.units import count_text
from fluxtui.wizard.checks.data_facts import Piece
from fluxtui.words import counted

BEYOND = 0.98  # longer documents than this share of them are put into the last column
EIGHTHS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSample:
    """A document as far as its first row: stretches that are learnt or only seen."""

    tokens: int
    shown_tokens: int
    learnt_tokens: int
    pieces: tuple[Piece, ...]

    @property
    def title(self) -> str:
        """How long it is, and how much of it is learnt and shown."""
        text = f"{counted(self.tokens, 'token')}, {self.learnt_tokens:,} learnt"
        part = self.shown_tokens < self.tokens
        return text + (f", the first {self.shown_tokens:,} shown" if part else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the engine saw in the first documents of the data."""

    sequence_length: int
    documents: int
    sampled_share: float
    estimated_documents: int
    estimated_tokens: int
    estimated_rows: int
    learnt_share: float
    cut_documents_share: float
    padding_share: float
    lengths: tuple[int, ...]
    samples: tuple[TokenSample, ...]

    @property
    def extent(self) -> str:
        """How much data there is, and how that is known."""
        if self.sampled_share >= 1:
            return f"{counted(self.documents, 'document')}, {count_text(sum(self.lengths))} tokens"
        return (
            f"about {count_text(self.estimated_documents)} documents, "
            f"{count_text(self.estimated_tokens)} tokens: from the first {self.documents:,}"
        )

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Name and value of every fact."""
        about = "" if self.sampled_share >= 1 else "about "
        return (
            ("size", self.extent),
            ("learnt", f"{self.learnt_share:.0%} of the tokens"),
            ("cut", f"{self.cut_documents_share:.0%} of the documents are longer than a row"),
            (
                "packed",
                f"{about}{count_text(self.estimated_rows)} rows of {self.sequence_length:,}, "
                f"{1 - self.padding_share:.0%} full",
            ),
        )


def read_inspection(answer: Mapping[str, Any]) -> Inspection:
    """The engine's answer as a value."""
    return Inspection(
        sequence_length=answer["sequence_length"],
        documents=answer["sampled_documents"],
        sampled_share=answer["sampled_share"],
        estimated_documents=answer["estimated_documents"],
        estimated_tokens=answer["estimated_tokens"],
        estimated_rows=answer["estimated_rows"],
        learnt_share=answer["learnt_share"],
        cut_documents_share=answer["cut_documents_share"],
        padding_share=answer["padding_share"],
        lengths=tuple(answer["lengths"]),
        samples=tuple(_sample(sample) for sample in answer["samples"]),
    )


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many documents have which length.

    Attributes:
        counts: of each column, from 0 tokens to `limit`; the last one also holds what is longer.
        marked: the column in which the sequence length lies.
        longest: of all documents.
    """

    counts: tuple[int, ...]
    limit: int
    marked: int
    longest: int


def histogram(lengths: Sequence[int], sequence_length: int, columns: int) -> Histogram:
    """Lengths in equal columns; the sequence length is always among them."""
    in_order = sorted(lengths)
    most = in_order[round(BEYOND * (len(in_order) - 1))]
    limit = max(most, sequence_length * 5 // 4, 1) + 1
    counts = [0] * columns
    for length in lengths:
        counts[min(columns - 1, length * columns // limit)] += 1
    marked = min(columns - 1, sequence_length * columns // limit)
    return Histogram(tuple(counts), limit, marked, in_order[-1])


def histogram_lines(found: Histogram, sequence_length: int, height: int) -> list[str]:
    """The histogram as `height` lines of bars, with the sequence length as a line through them,
    and a line below that names it."""
    most = max(found.counts)
    eighths = [0 if not n else max(1, round(n / most * height * 8)) for n in found.counts]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [EIGHTHS[max(0, min(8, level - row * 8))] for level in eighths]
        cells[found.marked] = "│"
        lines.append("".join(cells))
    return [*lines, _axis(found, sequence_length)]


def _axis(found: Histogram, sequence_length: int) -> str:
    columns = len(found.counts)
    end = f"{found.limit - 1:,}" + ("+" if found.longest >= found.limit else "")
    mark = f"{sequence_length:,} = a row"
    line = list("0".ljust(columns))
    line[columns - len(end) :] = end
    at = min(max(2, found.marked - len(mark) + 1), columns - len(end) - len(mark) - 1)
    if at >= 2:
        line[at : at + len(mark)] = mark
    return "".join(line)


def _sample(sample: Mapping[str, Any]) -> TokenSample:
    return TokenSample(
        tokens=sample["tokens"],
        shown_tokens=sample["shown_tokens"],
        learnt_tokens=sample["learnt_tokens"],
        pieces=tuple(Piece(piece["text"], piece["learnt"]) for piece in sample["pieces"]),
    )
