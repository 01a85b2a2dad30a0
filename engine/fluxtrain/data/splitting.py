"""Orders rows by a seed alone, and holds rows out by their content, so that neither ever changes.

Both hash, so that no version of a library gives others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fluxtrain.data.store.tokens import TokenSource
from fluxtrain.errors import BadInput

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

SORTED_MOST = 1 << 18  # rows whose hashes are sorted, in some 20 ms; more go through a network
_ROUNDS = 6
_LOW = np.uint64(0xFFFFFFFFFFFFFFFF)


def mixed(keys: Hashes) -> Hashes:
    """Hash every key (splitmix64)."""
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def salted(keys: Hashes, seed: int) -> Hashes:
    """Hash keys so that another seed gives others."""
    salt = mixed(np.array([seed % (1 << 64)], dtype=np.uint64))
    return mixed(salt ^ keys)


class Order:
    """A permutation of `count` rows for a seed and an epoch.

    Up to `SORTED_MOST` rows are sorted by their hashes. Of more rows none is held in memory: each
    place goes through a Feistel network over the next power of four, again until it is a row (Black
    and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"), so any part of the order is had in
    microseconds.
    """

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self._count = count
        state = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) % (1 << 64)
        self._salt = mixed(np.array([state], dtype=np.uint64))
        self._half = np.uint64(max(1, -(-(max(1, count - 1)).bit_length() // 2)))
        self._sorted: Ints | None = None
        if count <= SORTED_MOST:
            numbers: Hashes = np.arange(count, dtype=np.uint64)
            self._sorted = np.argsort(mixed(self._salt + numbers), kind="stable")

    def __len__(self) -> int:
        return self._count

    def between(self, first: int, last: int) -> Ints:
        """Return the rows at the places from `first` to before `last`; none beyond the end."""
        last = min(last, self._count)
        if self._sorted is not None:
            return self._sorted[first:last]
        places = np.arange(first, last, dtype=np.uint64)
        found = self._once(places)
        while len(outside := np.flatnonzero(found >= self._count)):
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, places: Hashes) -> Hashes:
        half = self._half
        mask = _LOW >> (np.uint64(64) - half)
        left, right = places >> half, places & mask
        for number in range(_ROUNDS):
            keys = mixed(self._salt + np.uint64(number))
            left, right = right, left ^ (mixed(keys ^ right) & mask)
        return (left << half) | right


FEW_DOCUMENTS, FEW_TOKENS = 10, 1000  # held out: fewer of both say little
_SHARES = (0.05, 0.1, 0.2, 0.3)  # to hold out in place of too little


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parts of a data set's tokens, each within one sample; in file order."""

    starts: Ints  # (S,)
    lengths: Ints  # (S,)

    @property
    def tokens(self) -> int:
        """Return how many tokens all spans have together."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The spans to train on and those to evaluate on; no token is in both."""

    trained: Spans
    held_out: Spans


def whole(tokens: TokenSource) -> Spans:
    """Return all samples."""
    return Spans(tokens.starts[:-1], np.diff(tokens.starts))


def split(tokens: TokenSource, share: float, row_tokens: int, seed: int) -> Split:
    """Hold out at least `share` of the tokens by whole rows of the data, and leave some to train.

    Rows are taken in the order of a hash of their content and `seed`: equal ones fall on the same
    side, wherever they are in the file, and all samples of a row with it. Of texts only the end is
    held out where a whole one would exceed the share by more than a row, or is all there is; an
    answer is never held out without its question, so of a single conversation nothing is.
    """
    if not 0.0 <= share < 1.0:
        raise BadInput(f"data.held_out is {share}: it is a share of the data, from 0 to below 1")
    spans = whole(tokens)
    if share == 0.0:
        return Split(spans, Spans(spans.starts[:0], spans.lengths[:0]))
    firsts = np.flatnonzero(np.diff(tokens.rows, prepend=-1))  # the first sample of each row
    sizes = np.add.reduceat(spans.lengths, firsts)
    held = np.zeros_like(sizes)  # how many tokens at the end of each row
    count = int(sizes.sum())
    wanted = max(round(share * count), min(row_tokens, count // 2))
    wanted = min(wanted, count - 1)
    order = np.argsort(salted(tokens.keys()[firsts], seed), kind="stable")
    reached = np.cumsum(sizes[order])
    place = int(np.searchsorted(reached, wanted))
    over = int(reached[place]) - wanted
    if place == len(order) - 1 and tokens.has_marks:
        place, over = place - 1, 0
    held[order[: place + 1]] = sizes[order[: place + 1]]
    if not tokens.has_marks and (over > row_tokens or place == len(order) - 1):
        held[order[place]] -= over
    return _split(spans, held, sizes, firsts)


def _split(spans: Spans, held: Ints, sizes: Ints, firsts: Ints) -> Split:
    """Divide samples: `held` tokens at the end of each row, which has one or several of them."""
    samples = np.diff(firsts, append=len(spans.lengths))
    before = np.cumsum(spans.lengths) - spans.lengths
    ends = np.repeat(before[firsts] + sizes - held, samples)  # where a row's held part begins
    kept = np.clip(ends - before, 0, spans.lengths)
    rest = spans.lengths - kept
    return Split(
        trained=Spans(spans.starts[kept > 0], kept[kept > 0]),
        held_out=Spans((spans.starts + kept)[rest > 0], rest[rest > 0]),
    )


def few_held_out(documents: int, tokens: int, all_documents: int) -> list[str]:
    """Say that evaluations say little where only a handful of documents is held out of all."""
    if not documents or documents >= FEW_DOCUMENTS or tokens >= FEW_TOKENS:
        return []
    share = next((one for one in _SHARES if one * all_documents >= FEW_DOCUMENTS), None)
    cure = f"set data.held_out={share:g}, or " if share else ""
    return [
        f"held out for evaluation: {documents} document{'s' * (documents > 1)} of {tokens} tokens, "
        f"too few to tell one model from another: {cure}name data to evaluate on in "
        "data.held_out_path"
    ]
