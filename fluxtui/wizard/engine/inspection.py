"""What the engine saw in the data, in words; and the histogram of its lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fluxtrain.events.answers.answers import InspectionAnswer
from fluxtrain.units import count_text
from fluxtui.words import counted

BEYOND = 0.98  # longer documents than this share of them are put into the last column
EIGHTHS = " ▁▂▃▄▅▆▇█"


def extent(found: InspectionAnswer) -> str:
    """Tell how much data there is, and whether that was counted or estimated."""
    documents = found.sampled_documents
    if found.is_whole:
        return f"{counted(documents, 'document')}, {count_text(found.sampled_tokens)} tokens"
    return (
        f"about {count_text(found.estimated_documents)} documents, "
        f"{count_text(found.estimated_tokens)} tokens: by {documents:,} of them"
    )


def inspection_rows(found: InspectionAnswer) -> tuple[tuple[str, str], ...]:
    """Name and value of every fact."""
    about = "" if found.is_whole else "about "
    return (
        ("size", extent(found)),
        ("trained on", f"{found.trained_share:.0%} of the tokens"),
        ("cut", f"{found.cut_documents_share:.0%} of the documents are longer than a row"),
        (
            "packed",
            f"{about}{count_text(found.estimated_rows)} rows of {found.sequence_length:,}, "
            f"{1 - found.padding_share:.0%} full",
        ),
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
    """Draw the histogram as `height` lines of bars, with the sequence length as a line across,
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
