"""Which parts live on the device: of the blocks some here and there, not the first of them.

A block on the host costs AdamW and copies; one on the device hides those of others. Where
the first blocks lived there, the backward pass would come to them last, when the moments (or the
updates of a step in backward) of all others had been waited for, and copies would rest while they
are
computed, for slots are few. Between the others they hide both, all along the way. Two come first:
they are computed while the forward pass waits for its first updates and copies.

Each count's blocks are those of the count before and one more, so that a run which changes its
placement moves no more than it must: the van der Corput sequence in base 2 (J. G. van der Corput,
Verteilungsfunktionen, 1935), which leaves about even gaps at every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol, TypeVar

DeviceFirst = Literal["embedding", "blocks"]  # which groups live on the device before others do

AT_THE_FRONT = 2  # blocks

_T = TypeVar("_T")


class Placed(Protocol):
    """A group that can live on the device: a block, or an edge (a module outside the blocks)."""

    @property
    def kind(self) -> str: ...


_P = TypeVar("_P", bound=Placed)


@lru_cache(maxsize=256)
def spread(count: int) -> tuple[int, ...]:
    """Return 0 to `count` - 1 in an order whose every prefix is spread about evenly, except for
    the first two."""
    front = min(AT_THE_FRONT, count)
    rest = count - front
    bits = max(1, (rest - 1).bit_length())
    backwards = (int(f"{at:0{bits}b}"[::-1], 2) for at in range(1 << bits))
    first, *others = dict.fromkeys(at * rest >> bits for at in backwards) if rest else (-1,)
    late = [first] if rest else []  # beside those at the front
    return (*range(front), *(front + at for at in [*others, *late]))


def spread_out(row: Sequence[_T], count: int) -> tuple[list[_T], list[_T]]:
    """Return `count` evenly spread items of the row, and the others; both in the row's order."""
    chosen = set(spread(len(row))[:count])
    return (
        [one for at, one in enumerate(row) if at in chosen],
        [one for at, one in enumerate(row) if at not in chosen],
    )


def parted(
    groups: Sequence[_P], count: int, first: DeviceFirst
) -> tuple[tuple[_P, ...], tuple[_P, ...]]:
    """Split `groups` (forward order) into the `count` that live on the device and the others, both
    in forward order. Chosen are blocks spread evenly, then `embedding` after the modules before
    it, and the other edges last."""
    chosen = _chosen(tuple(group.kind == "block" for group in groups), count, first)
    return (
        tuple(group for at, group in enumerate(groups) if at in chosen),
        tuple(group for at, group in enumerate(groups) if at not in chosen),
    )


@lru_cache(maxsize=4096)
def _chosen(are_blocks: tuple[bool, ...], count: int, first: DeviceFirst) -> frozenset[int]:
    every = range(len(are_blocks))
    blocks = [at for at in every if are_blocks[at]]
    before = list(range(blocks[0] if blocks and first == "embedding" else 0))
    chosen = [*before, *spread_out(blocks, max(0, count - len(before)))[0]]
    others = [at for at in every if not are_blocks[at] and at not in before]
    return frozenset([*chosen, *others][:count])
