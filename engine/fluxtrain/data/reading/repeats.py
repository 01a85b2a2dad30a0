"""Finds documents and ids that occur more than once, exactly after normalising, in bounded memory.

Of each document 16 bytes of a hash are kept with its place, in a temporary sqlite3 database: in
memory while it is small, then in a file that no other process sees and that ends with this one. 100
million documents need some 8 GB of disk. Where that disk is full, the search is given up and says
so: no run ends for it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fluxtrain.data.reading.report import Report
from fluxtrain.data.row import Row
from fluxtrain.files.temporary import free_text

DIGEST_BYTES = 16
CACHE_KIB = 32 << 10  # of the database that stay in memory, and of a sort
WRITTEN_TOGETHER = 4096  # rows
EXAMPLES = 3

_FOUND = """
    CREATE TEMP TABLE found_{table} AS
    SELECT digest, file, row, min(rowid) AS first, count(*) - 1 AS repeats,
           sum(file >= :border) AS held_out
    FROM {table} GROUP BY digest HAVING count(*) > 1
"""
_COUNTED = "SELECT total(repeats), total((file < :border) * held_out) FROM found_{table}"
_FIRST = """
    SELECT again.file, again.row, found.file, found.row
    FROM {table} AS again
    CROSS JOIN (SELECT * FROM found_{table} ORDER BY first LIMIT :examples) AS found
    ON again.digest = found.digest AND again.rowid > found.first
    ORDER BY again.rowid LIMIT :examples
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How many rows repeat an earlier one, and some of them, each with the earlier one."""

    rows: int = 0
    # (file, row, earlier file, earlier row); files count from 0, rows from 1
    examples: tuple[tuple[int, int, int, int], ...] = ()
    across: int = 0  # rows of the files from `border` on that are in the files before it too


class RepeatSearch:
    """Takes every document of a reading; a context manager that owns a temporary database."""

    def __init__(self) -> None:
        self._documents = 0
        self._hash = _RowHash()
        self._waiting: dict[str, list[tuple[bytes, int, int]]] = {"documents": [], "ids": []}
        self._given_up = ""  # why the temporary folder could not take the hashes; empty: it could
        self._database = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("BEGIN")
        for table in self._waiting:
            self._database.execute(f"CREATE TABLE {table} (digest BLOB, file INT, row INT)")

    def __enter__(self) -> RepeatSearch:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(sqlite3.Error):
            self._database.close()

    def take(self, file: int, row: Row, values: Mapping[str, Any]) -> None:
        """Take a row of a file, and the keys that the file gives it; files come in order."""
        digest = self._hash.after(row)
        if digest is None:
            return
        self._documents += 1
        self._add("documents", digest, file, row.origin.number)
        if (name := values.get("id")) is not None:  # unique within its file alone
            words = f"{file} {name!r}".encode(errors="replace")
            digest = blake2b(words, digest_size=DIGEST_BYTES).digest()
            self._add("ids", digest, file, row.origin.number)

    def describe(self, report: Report, names: Sequence[str], border: int | None = None) -> None:
        """Write the findings into `report`; files from `border` on are held-out data."""
        border = len(names) if border is None else border
        documents, ids = self.found("documents", border), self.found("ids", border)
        if self._given_up:
            report.repeated = f"repeated documents were not looked for: {self._given_up}"
            return
        if documents.rows:
            report.repeated = (
                f"repeated documents: {documents.rows:,} of {self._documents:,} say what an "
                f"earlier one says ({_examples(documents, names)})"
            )
        if ids.rows:
            report.repeated_ids = (
                f"repeated ids: {ids.rows:,} rows have the `id` of an earlier row of their file "
                f"({_examples(ids, names)})"
            )
        if documents.across:
            report.leaked = (
                f"held-out documents that are trained on too: {documents.across:,}; the loss on "
                "them says nothing about new ones"
            )

    def found(self, table: str, border: int) -> Repeats:
        """Count the rows of `documents` or `ids` that repeat an earlier one."""
        self._write(table)
        if self._given_up:
            return Repeats()
        values = {"border": border, "examples": EXAMPLES}
        ask = self._database.execute
        try:
            ask(_FOUND.format(table=table), values)
            rows, across = ask(_COUNTED.format(table=table), values).fetchone()
            if not rows:
                return Repeats()
            examples = ask(_FIRST.format(table=table), values).fetchall()
        except sqlite3.Error as error:
            self._give_up(error)
            return Repeats()
        return Repeats(rows=int(rows), examples=tuple(examples), across=int(across))

    def _add(self, table: str, digest: bytes, file: int, row: int) -> None:
        if self._given_up:
            return
        waiting = self._waiting[table]
        waiting.append((digest, file, row))
        if len(waiting) >= WRITTEN_TOGETHER:
            self._write(table)

    def _write(self, table: str) -> None:
        try:
            self._database.executemany(
                f"INSERT INTO {table} VALUES (?, ?, ?)", self._waiting[table]
            )
        except sqlite3.Error as error:
            self._give_up(error)
        self._waiting[table].clear()

    def _give_up(self, error: sqlite3.Error) -> None:
        """Forget all hashes, on the disk and in memory."""
        if self._given_up:
            return
        named = (os.environ.get(name) for name in ("SQLITE_TMPDIR", "TMPDIR"))
        folder = Path(next(filter(None, named), "/var/tmp"))  # where sqlite puts its files
        self._given_up = (
            f"the hashes of the rows cannot be written in {folder} ({error}; {free_text(folder)} "
            "free): make room, or set TMPDIR to a folder on another disk"
        )
        with suppress(sqlite3.Error):
            self._database.close()


class _RowHash:
    """Hashes the content of rows; the pieces of one long text make one hash."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)

    def after(self, row: Row) -> bytes | None:
        """Take a row; return the hash when its document is complete.

        White space counts once and capitals as small letters.
        """
        if row.messages:
            said = [
                {key: _normal(value) if isinstance(value, str) else value for key, value in one}
                for one in (message.items() for message in row.messages)
            ]
            self._hash.update(json.dumps([said, row.tools], sort_keys=True, default=str).encode())
        else:
            self._hash.update(_normal(row.text).encode("utf-8", "surrogatepass"))
        if not row.ends:
            return None
        digest = self._hash.digest()
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        return digest


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()


def _examples(found: Repeats, names: Sequence[str]) -> str:
    pairs = []
    for file, row, earlier_file, earlier_row in found.examples:
        there = "" if file == earlier_file else f" of {names[earlier_file]}"
        where = names[file] if len(names) > 1 else ""
        pairs.append(f"{where} {row} repeats {earlier_row}{there}".strip())
    return ", ".join(pairs)
