"""The activity of every stream and thread during one optimizer step: intervals in lanes.

A lane does one thing at a time: the computation, the copies in each direction, the optimizer on the
host, the disk. Only uploads to a GPU may overlap, two at a time, when one waited for others. Three
more lanes tell why: `stall` is the computation waiting for something, `host` is what the thread
that drives it was busy with, `queue` is when a GPU computed no faster than that thread queued its
work. Of several cards each has lanes of its own, `CARD_LANES`; the others are the host's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

LANES = ("gpu", "h2d", "d2h", "cpu", "disk", "stall", "host", "queue")  # in files: add at the end
BUSY_LANES = LANES[:5]
CARD_LANES = frozenset({"gpu", "h2d", "d2h", "stall", "queue"})
OTHER_CARDS = "cards"  # the cause of a stall: rows that another card computes
OTHER_RANKS = "ranks"  # the cause of a stall: gradients of other processes

_MAGIC = b"STEP"
_HEAD = struct.Struct("<4sIIQIQddddIIIII")
_INTERVAL = struct.Struct("<BBHHHII")
_CRC_FROM = 8  # after the magic and the checksum itself
_BEGAN_BEFORE, _GOES_ON, _CARD_FROM = 1, 2, 4  # the card is in the flags from this one on
_MOST_CARDS = 64
_TEXT_BYTES = 4096  # of the kinds and names of one record
_NO_TEXT = 0xFFFF
_TICK_S = 1e-6
_MOST_TICKS = (1 << 32) - 1


class Interval(NamedTuple):
    """Something that a lane did; times are seconds from the step's beginning."""

    lane: str
    kind: str  # forward, head, backward, gradients, update, weights, ...; the cause of a stall
    name: str  # which block
    start_s: float
    duration_s: float
    pieces: int = 1  # more than one: merged neighbours
    began_before: bool = False  # it began in the previous step
    goes_on: bool = False  # it goes on in the next one
    card: int = 0

    @property
    def stop_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True)
class StepLanes:
    """The lanes of one step, from its beginning to that of the next one."""

    step: int  # 1 for the first
    wall_s: float  # Unix time of its beginning
    length_s: float
    intervals: Sequence[Interval]  # by lane and start
    merged: int = 0  # intervals merged into others, because a record's size is bounded
    hidden_s: float = 0.0  # idle seconds that merged intervals cover
    late: int = 0  # intervals known only after the record of their step was written
    dropped: int = 0  # intervals that found no room
    process: int = 1  # which process of the run, from 1

    @property
    def cards(self) -> int:
        """Return the number of cards with lanes here."""
        return 1 + max((one.card for one in self.intervals), default=0)


def packed(step: StepLanes, sequence: int, room_bytes: int) -> bytes:
    """Pack the step into a record of at most `room_bytes`.

    Little-endian: "STEP", CRC-32 of all that follows it (u32), bytes of the record (u32), sequence
    (u64), process (u32), step (u64), wall_s, length_s, tick_s, hidden_s (f64 each), merged, late,
    dropped, number of intervals, bytes of texts (u32 each); texts, each ended by a zero byte; then
    per interval: lane (u8, index of `LANES`), flags (u8: 1 began before, 2 goes on, and the card in
    the six bits above), kind and name (u16 each, numbers of texts, 65535 for none), pieces (u16),
    start and duration (u32, in ticks).
    """
    texts, number = _texts(step.intervals)
    limit = (room_bytes - _HEAD.size - len(texts)) // _INTERVAL.size
    fitting, merged, hidden_s, dropped = merged_to_fit(step.intervals, limit)
    tick_s = max(_TICK_S, step.length_s / _MOST_TICKS * 1.001)
    parts = [b"", texts]
    for one in fitting:
        flags = _BEGAN_BEFORE * one.began_before + _GOES_ON * one.goes_on
        flags += _CARD_FROM * min(one.card, _MOST_CARDS - 1)
        parts.append(
            _INTERVAL.pack(
                LANES.index(one.lane), flags,
                number.get(one.kind, _NO_TEXT), number.get(one.name, _NO_TEXT),
                min(one.pieces, 0xFFFF), int(one.start_s / tick_s), int(one.duration_s / tick_s),
            )
        )  # fmt: skip
    size = _HEAD.size + len(texts) + len(fitting) * _INTERVAL.size
    fields = (
        size, sequence, step.process, step.step, step.wall_s, step.length_s, tick_s,
        step.hidden_s + hidden_s, step.merged + merged, step.late, step.dropped + dropped,
        len(fitting), len(texts),
    )  # fmt: skip
    parts[0] = _HEAD.pack(_MAGIC, 0, *fields)[_CRC_FROM:]
    body = b"".join(parts)
    return _MAGIC + struct.pack("<I", zlib.crc32(body)) + body


class Head(NamedTuple):
    """The part of a record before its intervals."""

    size: int
    sequence: int
    process: int
    step: int
    wall_s: float
    length_s: float
    tick_s: float
    hidden_s: float
    merged: int
    late: int
    dropped: int
    intervals: int
    text_bytes: int


def whole(raw: bytes) -> bytes | None:
    """Return the record at the beginning of `raw`; None if it is torn or no record."""
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        return None
    _, crc, size = struct.unpack_from("<4sII", raw)
    if not _HEAD.size <= size <= len(raw) or zlib.crc32(raw[_CRC_FROM:size]) != crc:
        return None
    head = head_of(raw)
    rest = head.text_bytes + head.intervals * _INTERVAL.size
    return raw[:size] if _HEAD.size + rest == size else None


def head_of(record: bytes) -> Head:
    """Return the head of a whole record."""
    return Head(*_HEAD.unpack_from(record)[2:])


def unpacked(record: bytes) -> StepLanes:
    """Return the step of a whole record, without lanes that this version does not know."""
    head = head_of(record)
    at = _HEAD.size + head.text_bytes
    texts = record[_HEAD.size : at].decode("utf-8", "replace").split("\0")
    intervals = []
    for lane, flags, kind, name, pieces, start, ticks in _INTERVAL.iter_unpack(record[at:]):
        if lane < len(LANES):
            intervals.append(
                Interval(
                    LANES[lane], _text(texts, kind), _text(texts, name),
                    start * head.tick_s, ticks * head.tick_s, pieces,
                    bool(flags & _BEGAN_BEFORE), bool(flags & _GOES_ON), flags // _CARD_FROM,
                )
            )  # fmt: skip
    return StepLanes(
        step=head.step, wall_s=head.wall_s, length_s=head.length_s, intervals=tuple(intervals),
        merged=head.merged, hidden_s=head.hidden_s, late=head.late, dropped=head.dropped,
        process=head.process,
    )  # fmt: skip


def queued_s(step: StepLanes) -> float:
    """Return the seconds in which the first card computed no faster than its work was queued."""
    return sum(one.duration_s for one in step.intervals if (one.lane, one.card) == ("queue", 0))


def without_evaluation(step: StepLanes) -> tuple[StepLanes, float]:
    """Return the step without the evaluation that followed it, and the seconds removed.

    An evaluation begins after a step's update and may last as long as a hundred steps; intervals
    after it (a checkpoint) move forward.
    """
    found = next((one for one in step.intervals if one.kind == "evaluation"), None)
    if found is None:
        return step, 0.0
    gone_s = found.duration_s
    kept = [
        one._replace(start_s=one.start_s - gone_s) if one.start_s >= found.stop_s else one
        for one in step.intervals
        if one is not found
    ]
    return replace(step, length_s=step.length_s - gone_s, intervals=tuple(kept)), gone_s


def merged_to_fit(
    intervals: Sequence[Interval], limit: int
) -> tuple[list[Interval], int, float, int]:
    """Return at most `limit` intervals, by lane and start; neighbours of one lane and kind are
    merged, the shortest first, until they fit. Also return how many were merged into others, the
    idle seconds hidden by that, and how many were dropped because no more could be merged.
    """
    kept = sorted(intervals, key=lambda one: (LANES.index(one.lane), one.card, one.start_s))
    hidden_s, before = 0.0, len(kept)
    while len(kept) > limit:
        pairs = [i for i in range(len(kept) - 1) if _alike(kept[i], kept[i + 1])]
        if not pairs:
            break
        pairs.sort(key=lambda i: kept[i + 1].stop_s - kept[i].start_s)
        taken: set[int] = set()
        for i in pairs:
            if len(taken) < len(kept) - limit and not {i - 1, i, i + 1} & taken:
                taken.add(i)
                hidden_s += max(0.0, kept[i + 1].start_s - kept[i].stop_s)
        kept = [
            _joined(one, kept[i + 1]) if i in taken else one
            for i, one in enumerate(kept)
            if i - 1 not in taken
        ]
    merged = before - len(kept)
    if len(kept) > limit:
        longest = set(sorted(range(len(kept)), key=lambda i: -kept[i].duration_s)[:limit])
        kept = [one for i, one in enumerate(kept) if i in longest]
    return kept, merged, hidden_s, before - merged - len(kept)


def _alike(one: Interval, other: Interval) -> bool:
    return (one.lane, one.card, one.kind) == (other.lane, other.card, other.kind)


def _joined(first: Interval, second: Interval) -> Interval:
    stop_s = max(first.stop_s, second.stop_s)
    return first._replace(
        duration_s=stop_s - first.start_s,
        pieces=first.pieces + second.pieces,
        goes_on=first.goes_on or second.goes_on,
    )


def _texts(intervals: Sequence[Interval]) -> tuple[bytes, dict[str, int]]:
    """Return kinds, then as many names as have room, and their numbers."""
    wanted = dict.fromkeys(one.kind for one in intervals)
    wanted.update(dict.fromkeys(one.name for one in intervals))
    number: dict[str, int] = {}
    found: list[bytes] = []
    room = _TEXT_BYTES
    for text in wanted:
        raw = text.encode("utf-8", "replace").replace(b"\0", b"") + b"\0"
        if len(raw) <= room:
            number[text] = len(found)
            found.append(raw)
            room -= len(raw)
    return b"".join(found), number


def _text(texts: list[str], number: int) -> str:
    return texts[number] if number < len(texts) - 1 else "?"


def with_process(step: StepLanes, process: int) -> StepLanes:
    """Return the step as one of the run's process number `process`."""
    return replace(step, process=process)
