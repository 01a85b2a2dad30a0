"""`timeline.ring`: the lanes of a run's last 256 steps, in a file of bounded size.

64 bytes of head ("FLUXRING", version, slots, bytes of a slot as u32, and from byte 24 the number of
records written so far as u64), then from byte 4096 the slots; record n is in slot n modulo 256. A
record is written with one call and carries a checksum, so a reader skips one that is torn or being
written, whatever killed the writer. At most 4 MiB and 4 KiB.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fluxtrain.events.trace.lanes import (
    Head,
    StepLanes,
    head_of,
    packed,
    unpacked,
    whole,
    with_process,
)
from fluxtrain.files.opening import open_plain, open_to_write

SLOTS = 256
SLOT_BYTES = 16 << 10
VERSION = 1
_MAGIC = b"FLUXRING"
_HEAD = struct.Struct("<8sIII4xQ")
_SLOTS_AT = 4096


def is_ring(path: Path) -> bool:
    """Return whether a file begins as rings of every version do."""
    try:
        with open_plain(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class RingWriter:
    """The only writer of a ring; a resumed run continues in the same file.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_write(path, os.O_RDWR | os.O_CREAT)
        self._written = self._process = 0
        try:
            if _layout(self._file) is None:
                os.ftruncate(self._file, 0)
                self._write_head()
            for record in _read_all(self._file).values():
                head = head_of(record)
                self._written = max(self._written, head.sequence + 1)
                self._process = max(self._process, head.process)
        except BaseException:
            os.close(self._file)
            raise
        self._process += 1

    def write(self, step: StepLanes) -> None:
        """Add one step in place of the oldest one."""
        sequence = self._written
        record = packed(with_process(step, self._process), sequence, SLOT_BYTES)
        os.pwrite(self._file, record, _offset(sequence))
        self._written = sequence + 1
        self._write_head()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write_head(self) -> None:
        head = _HEAD.pack(_MAGIC, VERSION, SLOTS, SLOT_BYTES, self._written)
        os.pwrite(self._file, head, 0)


@dataclass(frozen=True)
class Recorded:
    """One step's record in the ring; its intervals are unpacked on first use."""

    record: bytes
    head: Head

    @property
    def lanes(self) -> StepLanes:
        return _lanes(self.record)


@lru_cache(maxsize=4)
def _lanes(record: bytes) -> StepLanes:
    return unpacked(record)


class RingReader:
    """Follows a ring as it is written; never blocks the writer and needs no lock.

    `steps` holds the steps of the last `poll`, oldest first; empty for a missing or foreign file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[int, bytes] = {}  # by sequence
        self._seen: tuple[int, int, int] | None = None  # file, its size, records written
        self.exists = False
        self.steps: tuple[Recorded, ...] = ()

    def poll(self) -> bool:
        """Read new records; return whether `steps` changed."""
        try:
            file = open_plain(self._path)
        except OSError:
            changed = self.exists or bool(self.steps)
            self._records, self._seen, self.exists, self.steps = {}, None, False, ()
            return changed
        try:
            return self._read(file.fileno())
        except OSError:
            return False
        finally:
            file.close()

    def _read(self, file: int) -> bool:
        facts = os.fstat(file)
        written = _layout(file)
        self.exists = written is not None
        seen = (facts.st_ino, facts.st_size, -1 if written is None else written)
        if seen == self._seen:
            return False
        follows = self._seen is not None and seen[0] == self._seen[0] and seen[2] >= self._seen[2]
        if written is None:
            self._records = {}
        elif follows and self._records:
            for sequence in range(max(self._records) + 1, written):
                record = _read_slot(file, sequence % SLOTS)
                if record is not None and head_of(record).sequence == sequence:
                    self._records[sequence] = record
        else:
            self._records = _read_all(file)
        self._seen = seen
        newest = max(self._records, default=0)
        self._records = {n: r for n, r in sorted(self._records.items()) if n > newest - SLOTS}
        self.steps = _without_superseded(
            [Recorded(record, head_of(record)) for record in self._records.values()]
        )
        return True


def read_ring(path: Path) -> list[StepLanes]:
    """Return all whole steps of the ring, oldest first; [] without any."""
    reader = RingReader(path)
    reader.poll()
    return [unpacked(one.record) for one in reader.steps]


def _without_superseded(steps: list[Recorded]) -> tuple[Recorded, ...]:
    """Drop steps that a resumed process repeated."""
    kept: list[Recorded] = []
    for one in steps:
        while kept and kept[-1].head.step >= one.head.step:
            kept.pop()
        kept.append(one)
    return tuple(kept)


def _layout(file: int) -> int | None:
    """Return the number of records written so far; None if the file is no ring of our layout."""
    raw = os.pread(file, _HEAD.size, 0)
    if len(raw) < _HEAD.size:
        return None
    magic, version, slots, slot_bytes, written = _HEAD.unpack(raw)
    ours = (magic, version, slots, slot_bytes) == (_MAGIC, VERSION, SLOTS, SLOT_BYTES)
    return int(written) if ours else None


def _read_all(file: int) -> dict[int, bytes]:
    """Return every whole record by its sequence, in that order; do not trust the head's count."""
    found: dict[int, bytes] = {}
    for slot in range(SLOTS):
        record = _read_slot(file, slot)
        if record is not None:
            found[head_of(record).sequence] = record
    return dict(sorted(found.items()))


def _read_slot(file: int, slot: int) -> bytes | None:
    return whole(os.pread(file, SLOT_BYTES, _offset(slot)))


def _offset(sequence: int) -> int:
    return _SLOTS_AT + sequence % SLOTS * SLOT_BYTES
