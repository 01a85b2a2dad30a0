"""`Shares`: of each block's flat tensors every rank keeps one range at home, and updates it.

Of whole weights (`parallel.params: full`) the ranks of a machine share one memory, which each
updates in its range: a group can be read once all have done so. Else uploads bring a rank's own
range to a slot and gather the others there when the block computes.

The ranges are whole blocks of 8-bit states; what is left over at a tensor's end is the last rank's,
and where weights are gathered everybody's: every rank updates it alike. A home's memory stays one
mapping, in which other ranks' pages are never made, so that all code finds each weight at its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, distributed

from fluxtrain.core.device.worker import Worker
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.ranks.shared_memory import SharedMemory
from fluxtrain.plan.states import STATE_BLOCK

Span = tuple[int, int]  # from, to before
# torch 2.13 has a new name for it, and warns of the old one
gather_ = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_UPDATES = 0  # the counter of groups that a rank has updated its ranges of


class Shares:
    """One rank's ranges; used by the thread that computes."""

    def __init__(
        self,
        ranks: Ranks,
        devices: Sequence[torch.device],
        agree: Callable[[], None],
        memory: SharedMemory | None = None,
    ) -> None:
        """devices: that compute; `agree` is called before each exchange of them. memory: has the
        weights of all `ranks`, which are those of this machine."""
        self._agree, self.memory, self.ranks = agree, memory, ranks
        self._groups = [ranks.device_group(one) for one in devices] if memory is None else []
        self._done = None if memory is None else Worker("flux-ranks")
        self._updates = 0  # so many were queued
        self.ended = False  # rank 0 has the weights of all

    def done_by_all(self, own: Future[None]) -> Future[None]:
        """Return what is done once `own`, this rank's part of the next update in the order of all
        ranks, is done by all that share the weights, and fails as it does."""
        if self.memory is None or self._done is None:
            return own
        memory, self._updates = self.memory, self._updates + 1
        count = self._updates

        def wait() -> None:
            own.result()
            memory.post(_UPDATES, count)
            memory.wait(_UPDATES, count)

        return self._done.submit(wait)

    def close(self) -> None:
        """End the thread."""
        if self._done is not None:
            self._done.close()

    def own(self, elements: int) -> list[Span]:
        """Return the ranges of a flat tensor of so many elements that this rank is home to."""
        each, rank = self._each(elements), self.ranks.rank
        spans = [self.apart(elements)]
        if self.memory is None:
            spans = [(rank * each, (rank + 1) * each), (each * self.ranks.world, elements)]
        return [(start, stop) for start, stop in spans if start < stop]

    def apart(self, elements: int) -> Span:
        """Return this rank's range, which overlaps no other rank's."""
        each, rank = self._each(elements), self.ranks.rank
        return rank * each, elements if rank == self.ranks.world - 1 else (rank + 1) * each

    def own_parts(self, flat: Tensor, elements: int) -> list[Tensor]:
        """Return this rank's ranges of `flat`, which belongs to `elements` elements: it has one
        value for each, or one for each block of states."""
        return [flat[start:stop] for start, stop in self._spans_of(flat, elements)]

    def others(self, flat: Tensor, elements: int) -> Iterator[Span]:
        """Yield the ranges of bytes of `flat` that this rank is not home to."""
        end = 0
        for start, stop in [*self._spans_of(flat, elements), (flat.numel(), flat.numel())]:
            if end < start:
                yield end * flat.itemsize, start * flat.itemsize
            end = stop

    def gather(self, flat: Tensor, card: int) -> None:
        """Bring all ranks' ranges of `flat` (elements,), on the card, together in it."""
        whole = self._each(flat.numel()) * self.ranks.world
        if whole:
            (start, stop), *_ = self.own(flat.numel())
            mine = flat[start:stop].clone()  # first: it may find no memory
            self._agree()
            gather_(_bytes(flat[:whole]), _bytes(mine), group=self._groups[card])

    def at_first(self, flat: Tensor, elements: int) -> Tensor | None:
        """Return all of a flat tensor in host memory on rank 0, None on the others."""
        found = torch.empty_like(flat) if self.ranks.is_first else None
        world, of_each = self.ranks.world, self._each(elements)
        each = of_each if flat.numel() == elements else of_each // STATE_BLOCK
        start, whole = self.ranks.rank * each, each * world
        if each:
            parts = None if found is None else list(found[:whole].chunk(world))
            self._gather(flat[start : start + each], parts)
        if whole < len(flat):
            ends = None if found is None else [torch.empty_like(flat[whole:]) for _ in range(world)]
            self._gather(flat[whole:], ends)
            if found is not None and ends is not None:
                found[whole:] = ends[-1]
        return found

    def _gather(self, part: Tensor, parts: list[Tensor] | None) -> None:
        """Bring the parts of all ranks to `parts` on the first."""
        first = distributed.get_global_rank(self.ranks.host, 0)
        parts = None if parts is None else [_bytes(one) for one in parts]
        distributed.gather(_bytes(part), parts, first, group=self.ranks.host)

    def _spans_of(self, flat: Tensor, elements: int) -> list[Span]:
        spans = self.own(elements)
        if flat.numel() == elements:
            return spans
        return [(start // STATE_BLOCK, -(-stop // STATE_BLOCK)) for start, stop in spans]

    def _each(self, elements: int) -> int:
        return elements // (self.ranks.world * STATE_BLOCK) * STATE_BLOCK


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)  # gloo does not know every dtype
