"""Orders that depend on a seed alone, by hashing, so that no library version changes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
