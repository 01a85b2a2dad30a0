"""Which of a row of blocks live on the device: some here and there, not the first of them.

A block at home on the host costs AdamW and copies; one on the device hides those of others. Where
the first blocks lived there, the backward pass would come to them last, when the moments (or the
updates of an eager step) of all others had been waited for, and copies would rest while they are
computed, for slots are few. Between the others they hide both, all along the way. Two come first:
they are computed while the forward pass waits for its first updates and copies.

Each count's blocks are those of the count before and one more, so that a run which changes its
placement moves no more than it must: the van der Corput sequence in base 2 (J. G. van der Corput,
Verteilungsfunktionen, 1935), which leaves about even gaps at every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

AT_THE_FRONT = 2  # blocks

_T = TypeVar("_T")


@lru_cache(maxsize=256)
def spread(count: int) -> tuple[int, ...]:
    """0 to `count` - 1 in an order of which every beginning is spread about evenly, but for those
    at the front."""
    front = min(AT_THE_FRONT, count)
    rest = count - front
    bits = max(1, (rest - 1).bit_length())
    backwards = (int(f"{at:0{bits}b}"[::-1], 2) for at in range(1 << bits))
    first, *others = dict.fromkeys(at * rest >> bits for at in backwards) if rest else (-1,)
    late = [first] if rest else []  # beside those at the front
    return (*range(front), *(front + at for at in [*others, *late]))


def spread_out(row: Sequence[_T], count: int) -> tuple[list[_T], list[_T]]:
    """`count` of the row, or all, here and there, and the others; both in the row's order."""
    chosen = set(spread(len(row))[:count])
    return (
        [one for at, one in enumerate(row) if at in chosen],
        [one for at, one in enumerate(row) if at not in chosen],
    )
