"""Finds rows that say the same, exactly after normalising, in bounded memory.

Of each row 16 bytes of a hash are kept with its place. They are collected in parts by their first
byte and spill to one temporary file, so that only one part of 256 is looked at at a time: 100
million rows need 3 GB of disk and some 100 MB of memory. Where that disk refuses them, the search
is given up and says so: no run ends for it.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any, BinaryIO

from fluxtrain.data.row import Row
from fluxtrain.files.temporary import temporary_error

DIGEST_BYTES = 16
SPILL_BYTES = 32 << 20
EXAMPLES = 3

_ENTRY = struct.Struct(f"<{DIGEST_BYTES}sIQ")  # hash, file, row


@dataclass(frozen=True, slots=True)
class Place:
    """A row by the number of its file (from 0) and its own (from 1)."""

    file: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How many rows repeat an earlier one, and the first of them, each with the earlier one."""

    rows: int = 0
    examples: tuple[tuple[Place, Place], ...] = ()  # (repeating, repeated)
    across: int = 0  # rows of the files from `border` on that are in the files before it too


class Duplicates:
    """Collects hashes of rows; a context manager that owns a temporary file."""

    def __init__(self) -> None:
        self._parts: list[bytearray] = [bytearray() for _ in range(256)]
        self._held_bytes = 0
        self._spilled: list[list[tuple[int, int]]] = [[] for _ in range(256)]  # offset, bytes
        self._file: BinaryIO | None = None
        self.given_up = ""  # why the temporary folder could not take the hashes; empty: it could

    def __enter__(self) -> Duplicates:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # it writes what a full disk refused before
                self._file.close()

    def add(self, digest: bytes, place: Place) -> None:
        """Take the hash of a row."""
        if self.given_up:
            return
        self._parts[digest[0]] += _ENTRY.pack(digest, place.file, place.row)
        self._held_bytes += _ENTRY.size
        if self._held_bytes >= SPILL_BYTES:
            try:
                self._spill()
            except OSError as error:
                self._give_up(error)

    def repeats(self, border: int | None = None) -> Repeats:
        """Count the rows that repeat an earlier one; `border` is the first held-out file."""
        rows = across = 0
        examples: list[tuple[Place, Place]] = []
        for part in range(256):
            first: dict[bytes, tuple[int, int]] = {}
            for digest, file, row in sorted(self._entries(part), key=lambda entry: entry[1:]):
                earlier = first.setdefault(digest, (file, row))
                if earlier == (file, row):
                    continue
                rows += 1
                examples.append((Place(file, row), Place(*earlier)))
                if border is not None and earlier[0] < border <= file:
                    across += 1
            examples = sorted(examples, key=lambda pair: (pair[0].file, pair[0].row))[:EXAMPLES]
        return Repeats(rows=rows, examples=tuple(examples), across=across)

    def _spill(self) -> None:
        if self._file is None:
            # Closed by __exit__: the file lives as long as this object.
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        for number, part in enumerate(self._parts):
            if part:
                offset = self._file.seek(0, 2)
                self._file.write(part)
                self._spilled[number].append((offset, len(part)))
                part.clear()
        self._file.flush()
        self._held_bytes = 0

    def _give_up(self, error: OSError) -> None:
        """Forget all hashes, on the disk and in memory."""
        self.given_up = str(temporary_error(error, "the hashes of the rows"))
        self._close()
        self._parts = [bytearray() for _ in range(256)]
        self._spilled = [[] for _ in range(256)]

    def _entries(self, part: int) -> Iterator[tuple[bytes, int, int]]:
        for offset, size in self._spilled[part]:
            assert self._file is not None
            self._file.seek(offset)
            yield from _ENTRY.iter_unpack(self._file.read(size))
        yield from _ENTRY.iter_unpack(bytes(self._parts[part]))


class RowHash:
    """Hashes what rows say; the pieces of one long text make one hash."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)

    def after(self, row: Row) -> bytes | None:
        """Take a row; return the hash when its document is complete.

        White space counts once and capitals as small letters.
        """
        if row.messages:
            said = [_words(message) for message in row.messages]
            self._hash.update(json.dumps([said, row.tools], sort_keys=True, default=str).encode())
        else:
            self._hash.update(_normal(row.text).encode("utf-8", "surrogatepass"))
        if not row.ends:
            return None
        digest = self._hash.digest()
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        return digest


def id_hash(file: int, value: Any) -> bytes:
    """Hash an `id`, which must be unique within its file alone."""
    return blake2b(f"{file} {value!r}".encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


def _words(message: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _normal(value) if isinstance(value, str) else value for key, value in message.items()
    }


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
