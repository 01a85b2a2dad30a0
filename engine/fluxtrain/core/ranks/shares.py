"""`Shares`: of each block's flat tensors every rank keeps one range at home, and updates it.

Uploads bring a rank's own range to a slot and gather the others there when the block computes. The
ranges are whole blocks of 8-bit states; what is left over at a tensor's end is everybody's, and
every rank updates it alike. A home's memory stays one mapping, in which other ranks' pages are
never made, so that all code finds each weight at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed

from fluxtrain.core.ranks.join import Ranks
from fluxtrain.plan.states import STATE_BLOCK

Span = tuple[int, int]  # from, to before
# torch 2.13 has a new name for it, and warns of the old one
gather_ = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Shares:
    """One rank's ranges; used by the thread that computes."""

    def __init__(self, ranks: Ranks, device: torch.device, agree: Callable[[], None]) -> None:
        """device: that computes; `agree` is called before each exchange of it."""
        self._agree = agree
        self.ranks, self._group = ranks, ranks.device_group(device)
        self.ended = False  # rank 0 has the weights of all

    def own(self, elements: int) -> list[Span]:
        """Return the ranges of a flat tensor of so many elements that this rank is home to."""
        each, rank = self._each(elements), self.ranks.rank
        spans = (rank * each, (rank + 1) * each), (each * self.ranks.world, elements)
        return [(start, stop) for start, stop in spans if start < stop]

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

    def gather(self, flat: Tensor) -> None:
        """Bring all ranks' ranges of `flat` (elements,), on the device, together in it."""
        whole = self._each(flat.numel()) * self.ranks.world
        if whole:
            self._agree()
            (start, stop), *_ = self.own(flat.numel())
            gather_(_bytes(flat[:whole]), _bytes(flat[start:stop].clone()), group=self._group)

    def at_first(self, flat: Tensor, elements: int) -> Tensor | None:
        """Return all of a flat tensor in host memory on rank 0, None on the others."""
        world, spans = self.ranks.world, self._spans_of(flat, elements)
        if self._each(elements) == 0:
            return flat.clone() if self.ranks.is_first else None
        (start, stop), *rest = spans
        found = torch.empty_like(flat) if self.ranks.is_first else None
        parts = None
        if found is not None:
            parts = [_bytes(part) for part in found[: (stop - start) * world].chunk(world)]
            for first, last in rest:
                found[first:last] = flat[first:last]
        distributed.gather(_bytes(flat[start:stop]), parts, 0, group=self.ranks.host)
        return found

    def _spans_of(self, flat: Tensor, elements: int) -> list[Span]:
        spans = self.own(elements)
        if flat.numel() == elements:
            return spans
        return [(start // STATE_BLOCK, -(-stop // STATE_BLOCK)) for start, stop in spans]

    def _each(self, elements: int) -> int:
        return elements // (self.ranks.world * STATE_BLOCK) * STATE_BLOCK


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)  # gloo does not know every dtype
