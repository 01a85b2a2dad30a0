"""`Exchange`: the gradients of all ranks become one, before they are rounded and sent home.

A loop of a user's own takes means, as DistributedDataParallel does; `fluxtrain train` divides each
loss by what all ranks count, and takes sums. With several backward passes a step only the last one
exchanges, where the user's `no_sync` or the loop says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.core.ranks.shared_memory import SharedMemory
from fluxtrain.core.ranks.shares import Shares, gather_
from fluxtrain.errors import MisusedModel
from fluxtrain.events.trace.lanes import OTHER_RANKS
from fluxtrain.plan.dealing import EDGES_CARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fluxtrain.core.device.device import Device, Transfer
    from fluxtrain.plan.request import Order, Params

_PIECE_ELEMENTS = 1 << 24  # of a sum in rank order: 64 MiB of fp32 at a time


class RanOutElsewhere(Exception):
    """Another rank has run out of device memory in this step, which all begin again."""


@dataclass
class Link:
    """What one card of this process has to exchange with the same card of each other rank."""

    group: Any  # torch's process group
    under_way: Transfer | None = None  # the last exchange that was begun
    room: Tensor | None = None  # (elements,) fp32, for one piece of a sum in rank order
    left: Any = None  # the point after which the last sum's stream uses the room no more


class Exchange:
    """The sums or means over all ranks, in place; used by the thread of the backward pass."""

    def __init__(
        self,
        ranks: Ranks = ALONE,
        devices: Sequence[torch.device] = (),
        *,
        sums: bool = False,
        order: Order = "fast",
        params: Params | None = None,
        on_host: bool = False,
    ) -> None:
        """devices: the cards of this process, of which each rank has as many.
        order: `fixed` adds in the order of ranks, `fast` as the backend's all_reduce does.
        params: how ranks share weights and states; None: each has all of them. on_host: gradients
        of groups that they share are added there, by the ranks of one machine."""
        self.ranks, self._order = ranks, order
        self.sums = sums  # over ranks; else means
        self._factor = 1.0 if sums else 1.0 / ranks.world
        joined = devices if ranks.world > 1 else ()
        self._links = [Link(ranks.device_group(device)) for device in joined]
        # weights are gathered in groups of their own, while gradients are added in these
        self.shares, self.on_host = None, on_host
        self.memory: SharedMemory | None = None
        if joined and (on_host or (params == "full" and ranks.may_share_memory)):
            self.memory = SharedMemory(ranks.of_machine())
        if joined and params == "shard":
            self.shares = Shares(ranks, joined, self.agree)
        elif joined and self.memory is not None:
            self.shares = Shares(self.memory.mates, joined, self.agree, self.memory)
        self.agrees = False  # ranks tell each other before they send, since a step can be redone
        self.last_pass = True  # of a step: earlier ones keep their gradients on this rank
        self._waits: Callable[[], bool] = lambda: False  # for another pass, as a DDP says
        self._kept = False  # gradients of this rank alone wait for a pass that exchanges

    @property
    def factor(self) -> float:
        """Return what sums over ranks are multiplied by."""
        return self._factor

    @property
    def _adds_in_order(self) -> bool:
        return self._order == "fixed" and self.ranks.world > 2  # of two, all orders have one result

    @property
    def is_on(self) -> bool:
        """Return whether gradients that are complete now are exchanged."""
        return self.ranks.world > 1 and self.last_pass and not self._waits()

    def finishes(self) -> bool:
        """Return whether the sum that is complete now is exchanged, and note it where not."""
        if self.ranks.world == 1:
            return False
        self._kept = not self.is_on
        return not self._kept

    def close(self) -> None:
        """End the thread of shared weights."""
        if self.shares is not None:
            self.shares.close()
        if self.memory is not None:
            self.memory.close()

    def follow(self, waits: Callable[[], bool]) -> None:
        """Let `waits` say whether a later pass exchanges, as `no_sync` of a DDP around the model
        does."""
        self._waits = waits

    def refuse_kept(self) -> None:
        """Raise MisusedModel where the last backward pass was not exchanged, before its step."""
        if self._kept:
            self._kept = False
            raise MisusedModel(
                "the last backward pass before optimizer.step() was inside no_sync(), so the "
                "gradients are of this rank alone: leave no_sync() before the last pass of a step"
            )

    def agree(self, *, ran_out: bool = False) -> None:
        """Meet the other ranks where one of them may have `ran_out` of device memory, in whatever
        part of the step: what they were about to send or to end is left, by RanOutElsewhere."""
        if self.ranks.world == 1 or not self.agrees:
            return
        (out,) = self.ranks.most([self.ranks.rank + 1 if ran_out else 0])
        if out and not ran_out:
            raise RanOutElsewhere(f"device memory ran out in rank {out - 1}")

    def begin(self, flat: Tensor, device: Device, card: int) -> Transfer:
        """Begin to make `flat` (elements,) fp32 on the device, this process's card of that number,
        the sum or mean over ranks, beside its computation."""
        link = self._links[card]
        self._make_room(link, flat)
        self.agree()
        link.under_way = device.beside(partial(self.add_up, link, flat))
        return link.under_way

    def reduce(self, flat: Tensor) -> None:
        """Do what `begin` does on the first card, as a part of the computation."""
        link = self._links[EDGES_CARD]
        self._make_room(link, flat)
        self._take_turn(link)
        self.add_up(link, flat)

    def _take_turn(self, link: Link) -> None:
        """Let what was begun end first: ranks send in one order, and from one thread at a time."""
        self.agree()
        before, link.under_way = link.under_way, None
        if before is not None:
            before.wait_compute(OTHER_RANKS)

    def add_up(self, link: Link, flat: Tensor) -> None:
        """Make `flat` the sum or mean over ranks, on the thread or stream that this runs on."""
        queue = _queue_of(flat)  # of any lane, or of code between blocks
        if queue is not None and link.left is not None:
            queue.wait_event(link.left)
        if queue is not None and link.room is not None:
            link.room.record_stream(queue)
        if self._adds_in_order:
            for piece in flat.view(-1).split(_PIECE_ELEMENTS):
                self._add_in_order(link, piece)
        else:
            distributed.all_reduce(flat, group=link.group)
        if self._factor != 1.0:
            flat.mul_(self._factor)
        if queue is not None:
            link.left = queue.record_event()

    def reduce_gradient(self, parameter: Tensor) -> None:
        """Exchange the gradient of a parameter that torch's own optimizer steps (a hook)."""
        if self.finishes() and parameter.grad is not None:
            total = parameter.grad.float()
            self.reduce(total)
            parameter.grad.copy_(total)

    def reduce_on_host(self, flat: Tensor) -> None:
        """Do what `reduce` does with host memory, of any float dtype."""
        self._take_turn(self._links[EDGES_CARD])
        parts = [torch.empty_like(flat) for _ in range(self.ranks.world)]
        sent = [part.view(-1).view(torch.uint8) for part in (flat, *parts)]  # of any dtype
        distributed.all_gather(sent[1:], sent[0], group=self.ranks.host)
        flat.copy_(add_in_order(part.float() for part in parts).mul_(self._factor))

    def numbers(self, values: Tensor) -> Tensor:
        """Return the sum or mean over ranks of numbers (n,) fp32 on the device, such as losses."""
        if self.ranks.world == 1 or not values.numel():
            return values
        found = values.clone()
        self.reduce(found)
        return found

    def gather_rows(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return every rank's rows (U,) int64 on the host, each ascending, as one ascending tensor
        (V,), and the sum or mean (V, H) in fp32 of `values` (U, H), which are on the first
        card."""
        self._take_turn(link := self._links[EDGES_CARD])
        world = self.ranks.world
        counts = torch.zeros(world, dtype=torch.int64)
        gather_(counts, torch.tensor([len(rows)]), group=self.ranks.host)
        most, width = int(counts.max()), values.shape[1]
        mine = rows.new_zeros(most)
        mine[: len(rows)] = rows
        every = rows.new_empty(world * most)
        gather_(every, mine, group=self.ranks.host)
        sent = torch.zeros(most, width, dtype=torch.float32, device=values.device)
        sent[: len(rows)] = values
        there = sent.new_empty(world * most, width)
        self.agree()  # once more: a rank without this memory would leave the others waiting
        gather_(there, sent, group=link.group)
        of_rank = [every[r * most : r * most + int(counts[r])] for r in range(world)]
        merged = torch.unique(torch.cat(of_rank))
        total = torch.zeros(len(merged), width, dtype=torch.float32, device=values.device)
        for r, found in enumerate(of_rank):  # in the order of ranks
            places = torch.searchsorted(merged, found).to(values.device)
            total.index_add_(0, places, there[r * most : r * most + len(found)])
        return merged, total.mul_(self._factor)

    def _make_room(self, link: Link, flat: Tensor) -> None:
        """Take the memory that adding `flat` up needs. Before ranks agree to send: one that runs
        out of memory later would leave the others waiting for it."""
        if not self._adds_in_order:
            return
        world = self.ranks.world
        count = 2 * world * -(-min(flat.numel(), _PIECE_ELEMENTS) // world)
        if link.room is not None and len(link.room) >= count:
            return
        if link.under_way is not None:  # it uses what is freed here
            link.under_way.wait_compute(OTHER_RANKS)
        link.room = None
        link.room = flat.new_empty(count)

    def _add_in_order(self, link: Link, piece: Tensor) -> None:
        """Let each rank add its range of the piece in the order of ranks, and gather the sums."""
        assert link.room is not None
        world, count = self.ranks.world, piece.numel()
        each = -(-count // world)
        sent, arrived = link.room[: 2 * world * each].chunk(2)
        sent[:count] = piece
        sent[count:].zero_()
        distributed.all_to_all_single(arrived, sent, group=link.group)
        gather_(sent, add_in_order(arrived.view(world, each)), group=link.group)
        piece.copy_(sent[:count])


def _queue_of(flat: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(flat.device) if flat.is_cuda else None


def add_in_order(parts: Iterable[Tensor]) -> Tensor:
    """Add the parts of all ranks to the first one's, in their order; return it."""
    total, *others = parts
    for other in others:
        total.add_(other)
    return total


NOT_EXCHANGED = Exchange()
