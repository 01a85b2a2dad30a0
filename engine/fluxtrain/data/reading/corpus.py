"""Reads the rows of all data files in order, and accounts for every key and every bad row."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fluxtrain.data.containers.record import Problem, Record
from fluxtrain.data.containers.texts import pieces_of
from fluxtrain.data.reading.files import Entry, files_of
from fluxtrain.data.reading.hub import hub_parts
from fluxtrain.data.reading.parts import Part, file_part
from fluxtrain.data.reading.repeats import RepeatSearch
from fluxtrain.data.reading.report import LISTED, Report
from fluxtrain.data.row import Row
from fluxtrain.data.shapes.convert import Converter, check_columns
from fluxtrain.data.shapes.refused import RowRefused
from fluxtrain.errors import BadInput, brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The files that are trained on, and how they are read."""

    parts: tuple[Part, ...]
    max_bad_rows: int = 0
    left_out_files: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files as they lie on the disk."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def endless(self) -> str:
        """Return which parts have an unknown size, so that no share of them is known."""
        names = ", ".join(part.name for part in self.parts if not part.has_end)
        return f"how much {names} holds is not known: only its first rows are counted" * bool(names)

    @property
    def name(self) -> str:
        """Name the corpus for a message."""
        first = self.parts[0].name
        return first if len(self.parts) == 1 else f"{first} and {len(self.parts) - 1} more files"


def corpus_of(entries: Sequence[Entry], max_bad_rows: int = 0, key: str = "data.path") -> Corpus:
    """Look at every file of the entries. Raises BadInput for the first that cannot be used."""
    parts: list[Part] = []
    left_out: list[str] = []
    seen: dict[tuple[str, str], str] = {}
    for entry in entries:
        check_columns(entry.rules.columns)
        if entry.path.startswith("hf:"):
            parts += hub_parts(entry)
            continue
        if entry.configuration or entry.split:
            raise BadInput(f"{key} {entry.path} is a local file: configuration and split are hub's")
        found = files_of(entry.path, key)
        parts += [file_part(path, entry.rules, entry.weight) for path in found.files]
        for path in found.files:  # of one entry each is there once
            before = seen.setdefault((os.path.realpath(path), repr(entry.rules)), entry.path)
            if before != entry.path:
                raise BadInput(
                    f"{key} names {brief(str(path))} twice, in {brief(before)} and in "
                    f"{brief(entry.path)}: name it once, with a weight where an epoch should draw "
                    "its rows more often"
                )
        left_out += [str(path) for path in found.left_out]
    return Corpus(parts=tuple(parts), max_bad_rows=max_bad_rows, left_out_files=tuple(left_out))


class Reading:
    """One pass over a corpus: an iterable of rows, with a report that grows on the way."""

    def __init__(
        self, corpus: Corpus, search: RepeatSearch | None = None, first_file: int = 0
    ) -> None:
        """Prepare reading.

        `search` is given every document, to find the ones that repeat others; `first_file` is its
        number of the first file.
        """
        self.corpus = corpus
        self.report = Report(left_out_files=list(corpus.left_out_files))
        self.share = 0.0  # of the corpus that was read, from 0 to 1
        self._search, self._first_file = search, first_file

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows. Raises BadInput at too many bad rows, and if there is no good one.

        Up to `LISTED` bad rows are looked for before the reading stops, so that a person can
        repair them together.
        """
        limit, before_bytes = self.corpus.max_bad_rows, 0
        for number, part in enumerate(self.corpus.parts):
            rounds = max(1, math.ceil(part.weight))
            for turn in range(rounds):
                drawn = min(1.0, part.weight - turn)
                with part.open() as items:
                    for row in self._rows(part, iter(items), number, drawn, counts=turn == 0):
                        done = (turn + items.share) / rounds
                        self._advance(before_bytes + done * part.size_bytes)
                        yield row
            before_bytes += part.size_bytes
        self.share = 1.0
        self.report.check(limit)
        if not self.report.rows:
            raise BadInput(f"{self.corpus.name} is empty: there is nothing to train on")

    def check(self) -> None:
        """Raise BadInput if more rows are bad than `data.max_bad_rows` of those read so far."""
        self.report.check(self.corpus.max_bad_rows, whole=False)

    def _advance(self, read_bytes: float) -> None:
        self.share = min(1.0, read_bytes / max(1, self.corpus.size_bytes))

    def _rows(
        self,
        part: Part,
        items: Iterator[Row | Record | Problem],
        number: int,
        drawn: float,
        counts: bool,
    ) -> Iterator[Row]:
        """Yield the rows of one part that are drawn; in its first round they are counted."""
        left_out: dict[str, None] = {}  # keys in their order
        converter = Converter(part.shape, part.rules, left_out.setdefault)
        limit = max(self.corpus.max_bad_rows + 1, LISTED)
        document = 0
        for item in items:
            made: Row | Problem | None = item if not isinstance(item, Record) else None
            if isinstance(item, Record):
                left_out.clear()
                try:
                    made = converter.row(item)
                except RowRefused as refused:
                    made = Problem(item.origin, str(refused))
            if counts:
                self._count(item, made, left_out, number)
            if isinstance(made, Problem) and self.report.bad >= limit:
                self.report.check(self.corpus.max_bad_rows, whole=False)
            if isinstance(made, Row):
                document += made.begins
                if drawn >= 1.0 or _is_drawn(document, drawn):
                    yield from pieces_of(made) if isinstance(item, Record) else (made,)

    def _count(
        self,
        item: Row | Record | Problem,
        made: Row | Problem | None,
        left_out: dict[str, None],
        part: int,
    ) -> None:
        report = self.report
        if isinstance(made, Problem):
            report.take(made)
            return
        report.ignored.update(left_out.keys())
        if left_out and isinstance(item, Record):
            report.shadowed |= {
                key: key.lower()
                for key in left_out
                if not key.islower() and key.lower() in item.values
            }
        if made is None:
            report.blank += 1
            return
        report.rows += made.ends
        if self._search is not None:
            self._search.take(
                self._first_file + part, made, item.values if isinstance(item, Record) else {}
            )


@contextmanager
def readings_of(corpora: Sequence[Corpus]) -> Iterator[list[Reading]]:
    """Begin to read corpora of one run. In the end the first one's report holds the findings of
    all, with repeated rows."""
    with RepeatSearch() as search:
        readings: list[Reading] = []
        for corpus in corpora:
            first = sum(len(reading.corpus.parts) for reading in readings)
            readings.append(Reading(corpus, search, first_file=first))
        yield readings
        report = readings[0].report
        for reading in readings[1:]:
            report.add(reading.report)
        names = [part.name for corpus in corpora for part in corpus.parts]
        search.describe(report, names, len(corpora[0].parts))


def _is_drawn(document: int, share: float) -> bool:
    """Choose a share of the documents evenly over the file, the same ones in every reading."""
    return (document * 0x9E3779B97F4A7C15) % (1 << 64) < share * (1 << 64)
