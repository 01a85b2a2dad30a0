"""Searches a reading for documents and ids that occur more than once, and words what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from fluxtrain.data.reading.duplicates import Duplicates, Place, Repeats, RowHash, id_hash
from fluxtrain.data.reading.report import Report
from fluxtrain.data.row import Row


class RepeatSearch:
    """Takes every document of a reading; a context manager that owns temporary files."""

    def __init__(self) -> None:
        self._words, self._ids = Duplicates(), Duplicates()
        self._hash = RowHash()
        self._documents = 0

    def __enter__(self) -> RepeatSearch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._words.__exit__(kind, error, trace)
        self._ids.__exit__(kind, error, trace)

    def take(self, file: int, row: Row, values: Mapping[str, Any]) -> None:
        """Take a row of a file, and the keys that the file gives it."""
        place = Place(file, row.origin.number)
        digest = self._hash.after(row)
        if digest is None:
            return
        self._documents += 1
        self._words.add(digest, place)
        if (name := values.get("id")) is not None:
            self._ids.add(id_hash(file, name), place)

    def describe(self, report: Report, names: Sequence[str], border: int | None = None) -> None:
        """Write into `report` what was found; from the file `border` on it is held-out data."""
        words, ids = self._words.repeats(border), self._ids.repeats()
        if self._words.given_up:
            report.repeated = f"repeated documents were not looked for: {self._words.given_up}"
        if self._ids.given_up:
            report.repeated_ids = f"repeated ids were not looked for: {self._ids.given_up}"
        if words.rows:
            report.repeated = (
                f"repeated documents: {words.rows:,} of {self._documents:,} say what an earlier "
                f"one says ({_examples(words, names)})"
            )
        if ids.rows:
            report.repeated_ids = (
                f"repeated ids: {ids.rows:,} rows have the `id` of an earlier row of their file "
                f"({_examples(ids, names)})"
            )
        if words.across:
            report.leaked = (
                f"held-out documents that are trained on too: {words.across:,}; the loss on them "
                "says nothing about new ones"
            )


def _examples(found: Repeats, names: Sequence[str]) -> str:
    pairs = []
    for repeating, repeated in found.examples:
        there = "" if repeating.file == repeated.file else f" of {names[repeated.file]}"
        where = names[repeating.file] if len(names) > 1 else ""
        pairs.append(f"{where} {repeating.row} repeats {repeated.row}{there}".strip())
    return ", ".join(pairs)
