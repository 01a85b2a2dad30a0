"""What rows are made from: the tokens of all samples, behind one interface, and those in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fluxtrain.data.encoding.samples import Ids, Marks, Sample

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

COUNTED_AT_ONCE = 1 << 24  # marks whose sums are in memory together: 128 MiB


class TokenSource(Protocol):
    """The tokens of a data set, sample by sample; a place counts tokens from the first sample."""

    @property
    def starts(self) -> Ints:
        """Return where each sample begins, and where the last one ends: shape (D + 1,)."""

    @property
    def rows(self) -> Ints:
        """Return which row of the data each sample is made of, ascending: shape (D,)."""

    @property
    def has_marks(self) -> bool:
        """Return whether only marked tokens are trained on."""

    @property
    def largest(self) -> int:
        """Return the largest token."""

    def keys(self) -> Keys:
        """Return a hash of each sample's content: shape (D,)."""

    def ids_at(self, start: int, count: int) -> Ids:
        """Return `count` tokens from `start` on, all of one sample."""

    def marks_at(self, start: int, count: int) -> Marks:
        """Return the marks of `count` tokens from `start` on; only with `has_marks`."""

    def origin(self, sample: int) -> str:
        """Return the place of the row that a sample is made of: its file and line."""

    def digest(self) -> str:
        """Return a hash of all tokens and marks, in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Samples in memory: 4 bytes a token, 5 with marks."""

    ids: Ids  # (N,)
    starts: Ints  # (D + 1,): sample d is ids[starts[d] : starts[d + 1]]
    trained: Marks | None = None  # (N,): token is trained on; None: all are
    origins: tuple[str, ...] = ()  # (D,)
    row_numbers: Ints | None = None  # (D,); None: each sample is a row of its own

    @property
    def documents(self) -> int:
        """Return the number of samples."""
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @property
    def rows(self) -> Ints:
        """Return which row of the data each sample is made of."""
        return np.arange(self.documents) if self.row_numbers is None else self.row_numbers

    @property
    def has_marks(self) -> bool:
        """Return whether only marked tokens are trained on."""
        return self.trained is not None

    @property
    def largest(self) -> int:
        """Return the largest token."""
        return int(self.ids.max())

    def keys(self) -> Keys:
        """Return a hash of each sample's content."""
        keys = np.empty(self.documents, dtype=np.uint64)
        for sample in range(self.documents):
            start, end = self.starts[sample : sample + 2]
            keys[sample] = content_key(self.ids[start:end])
        return keys

    def ids_at(self, start: int, count: int) -> Ids:
        """Return `count` tokens from `start` on."""
        return self.ids[start : start + count]

    def marks_at(self, start: int, count: int) -> Marks:
        """Return the marks of `count` tokens from `start` on."""
        if self.trained is None:
            return np.ones(count, dtype=np.bool_)
        return self.trained[start : start + count]

    def origin(self, sample: int) -> str:
        """Return the place of the row that a sample is made of."""
        return self.origins[sample] if self.origins else f"sample {sample + 1}"

    def digest(self) -> str:
        """Return a hash of all tokens and marks."""
        made = blake2b(digest_size=16)
        made.update(self.ids.data.cast("B"))
        made.update(np.ascontiguousarray(self.starts).data.cast("B"))
        if self.trained is not None:
            made.update(self.trained.data.cast("B"))
        return made.hexdigest()


def in_memory(samples: Iterable[tuple[Sample, int]]) -> Tokens:
    """Collect samples, at least one, each with the number of its row."""
    ids: list[Ids] = []
    marks: list[Marks | None] = []
    origins: list[str] = []
    rows: list[int] = []
    for sample, row in samples:
        ids.append(sample.ids)
        marks.append(sample.marks)
        origins.append(str(sample.row.origin))
        rows.append(row)
    starts = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(one) for one in ids], out=starts[1:])
    trained = None
    if any(one is not None for one in marks):
        whole = [
            np.ones(len(own), dtype=np.bool_) if one is None else one
            for own, one in zip(ids, marks, strict=True)
        ]
        trained = np.concatenate(whole)
    return Tokens(np.concatenate(ids), starts, trained, tuple(origins), np.asarray(rows))


def content_key(ids: Ids) -> int:
    """Return a hash of a sample's tokens; equal samples have equal ones in every store."""
    digest = blake2b(ids.astype(np.uint32, copy=False).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def trained_in(tokens: TokenSource, starts: Ints, counts: Ints) -> Ints:
    """Count the trained tokens of ascending stretches: the first of a stretch never is.

    Marks are summed a part at a time, so memory does not grow with the data.
    """
    if not tokens.has_marks:
        return counts - 1
    found = np.zeros(len(starts), dtype=np.int64)
    at = 0
    while at < len(starts):
        first = int(starts[at])
        last = int(np.searchsorted(starts + counts, first + COUNTED_AT_ONCE, side="right"))
        last = max(last, at + 1)
        end = int(starts[last - 1] + counts[last - 1])
        sums = np.zeros(end - first + 1, dtype=np.int64)
        np.cumsum(_marks_between(tokens, first, end), out=sums[1:])
        here = slice(at, last)
        found[here] = sums[starts[here] + counts[here] - first] - sums[starts[here] + 1 - first]
        at = last
    return found


def _marks_between(tokens: TokenSource, first: int, end: int) -> Marks:
    """Return the marks of all tokens between two places, over the borders of samples."""
    bounds = tokens.starts
    sample = int(np.searchsorted(bounds, first, side="right")) - 1
    parts: list[Marks] = []
    while first < end:
        stop = min(end, int(bounds[sample + 1]))
        parts.append(tokens.marks_at(first, stop - first))
        first, sample = stop, sample + 1
    return np.concatenate(parts)
