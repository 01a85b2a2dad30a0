"""Bounded histories that a pure fold can append to in constant time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeGuard, TypeVar

import msgspec
from msgspec.structs import replace

from fluxtrain.events.events import Event

Item = TypeVar("Item")
Sample = TypeVar("Sample", bound=Event)
SAMPLES_APART_S = 0.45  # a live pipe brings ten a second; charts keep two
DISORDER_S = 2.0  # events by pipe and by journal may arrive out of order


class History(Generic[Item]):
    """The last `limit` items; appending returns a new history and leaves the old one as it was.

    Versions share one list: each sees only its own prefix, so a long chain of appends costs
    O(1) each. Appending to an older version copies, as it must.
    """

    __slots__ = ("_end", "_items", "_start", "limit", "total")

    def __init__(
        self,
        limit: int,
        items: list[Item] | None = None,
        start: int = 0,
        end: int = 0,
        total: int = 0,
    ) -> None:
        self.limit = limit
        self.total = total  # that were ever appended
        self._items: list[Item] = [] if items is None else items
        self._start, self._end = start, end

    def appended(self, item: Item) -> History[Item]:
        """Append `item` as the newest."""
        items, start, end = self._items, self._start, self._end
        if len(items) != end or start > 4 * self.limit:
            items, start, end = items[start:end], 0, end - start
        items.append(item)
        end += 1
        return History(self.limit, items, max(start, end - self.limit), end, self.total + 1)

    def __len__(self) -> int:
        return self._end - self._start

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items[self._start : self._end])

    def last(self, count: int) -> list[Item]:
        """Return the newest `count` items, oldest first."""
        return self._items[max(self._start, self._end - count) : self._end]

    @property
    def newest(self) -> Item | None:
        return self._items[self._end - 1] if self._end > self._start else None


def spaced(history: History[Sample], event: Sample) -> History[Sample]:
    """Append a sample if it is late enough after the one before. A clock that was set back begins
    a new history: no axis could show both times."""
    newest = history.newest
    if newest is not None and event.wall_s < newest.wall_s - DISORDER_S:
        return History[Sample](history.limit).appended(event)
    if newest is not None and 0 <= event.wall_s - newest.wall_s < SAMPLES_APART_S:
        return history
    return history.appended(event)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive steps seen as one point of a curve."""

    first: int
    last: int
    count: int
    total: float
    low: float
    high: float
    smooth: float  # the moving average after the last of these steps

    @property
    def mean(self) -> float:
        return self.total / self.count

    def with_value(self, step: int, value: float, smooth: float) -> Bucket:
        """Add one step; a curve leaves out a value that is not finite."""
        return Bucket(
            self.first, step, self.count + 1, self.total + value,
            min(self.low, value), max(self.high, value), smooth,
        )  # fmt: skip

    def joined(self, later: Bucket) -> Bucket:
        """Merge two neighbours into one."""
        return Bucket(
            self.first, later.last, self.count + later.count, self.total + later.total,
            min(self.low, later.low), max(self.high, later.high), later.smooth,
        )  # fmt: skip


DRAWABLE = 1e100  # sums and squares of values up to here stay finite


def drawable(value: float | None) -> TypeGuard[float]:
    """Return whether a value has a place on an axis: known, finite and not nearly infinite."""
    return value is not None and abs(value) < DRAWABLE


class Curve(msgspec.Struct, frozen=True):
    """A value by step over the whole run in a bounded number of buckets.

    When the buckets are used up, neighbours are joined and the stride doubles, so a run of any
    length keeps its whole shape. `ema_steps` is the time constant of the moving average; its
    bias of the first steps is corrected as in Adam (Kingma and Ba, 2015, section 3).
    """

    limit: int = 2048
    ema_steps: int = 10
    stride: int = 1
    closed: tuple[Bucket, ...] = ()
    tail: tuple[Bucket, ...] = ()  # recent buckets, not yet merged into `closed`
    open: Bucket | None = None
    average: float = 0.0  # the uncorrected moving average
    weight: float = 0.0

    def with_value(self, step: int, value: float) -> Curve:
        """Add one step; a curve leaves out a value that is not finite."""
        if not drawable(value):
            return self
        keep = 1.0 - 1.0 / self.ema_steps
        average = keep * self.average + (1 - keep) * value
        weight = keep * self.weight + (1 - keep)
        smooth = average / weight
        if self.open is None:
            bucket = Bucket(step, step, 1, value, value, value, smooth)
        else:
            bucket = self.open.with_value(step, value, smooth)
        grown = replace(self, open=bucket, average=average, weight=weight)
        return grown._closed_up() if bucket.count >= self.stride else grown

    def _closed_up(self) -> Curve:
        assert self.open is not None
        tail = (*self.tail, self.open)
        if len(tail) < 64:  # a short tail keeps the cost of a step independent of the run's length
            return replace(self, tail=tail, open=None)
        closed, stride = self.closed + tail, self.stride
        if len(closed) >= self.limit:
            pairs = zip(closed[::2], closed[1::2], strict=False)
            merged = [first.joined(second) for first, second in pairs]
            if len(closed) % 2:
                merged.append(closed[-1])
            closed, stride = tuple(merged), stride * 2
        return replace(self, closed=closed, tail=(), open=None, stride=stride)

    def until(self, step: int) -> Curve:
        """Drop what came after `step`: a resumed run does those steps again."""
        if not self.buckets or self.buckets[-1].last <= step:
            return self
        kept = tuple(bucket for bucket in self.buckets if bucket.last <= step)
        weight = 1.0 if kept else 0.0
        return replace(
            self,
            closed=kept, tail=(), open=None, weight=weight,
            average=kept[-1].smooth if kept else 0.0,
        )  # fmt: skip

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Return all buckets, oldest first."""
        return self.closed + self.tail + ((self.open,) if self.open else ())

    @property
    def smooth(self) -> float | None:
        """Return the moving average after the newest step."""
        return self.average / self.weight if self.weight else None
