"""The head's loss with the bits of one card, its chunks of tokens computed by all cards.

Logits, losses and slopes of a token depend on no other token, so any card computes them to the same
bits in chunks of the same tokens. What depends on an order is the sum of the weight's gradient:
slopes travel to the first card, which adds each chunk up in the order of one card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluxtrain.edges.chunk_loss import (
    FusedChunks,
    HeadLoss,
    TokenSums,
    chunks_of,
    loss_of_chunk,
    loss_of_tokens,
    tokens_at_once,
)
from fluxtrain.edges.head_call import HeadCall
from fluxtrain.edges.shared_head import head_on, tensors_of
from fluxtrain.handover.carried import sent
from fluxtrain.plan.cards.shares import LANDED_SLOPES, SENT_SLOPES, cards_of_chunks
from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.cards.pieces import wait_for_all


def loss_in_order(
    call: HeadCall, head: HeadLoss, hidden: Tensor, losses: Tensor, sums: TokenSums
) -> None:
    """Compute what `loss_of_tokens` computes, bit for bit."""
    cards, wished = call.context.cards, call.context.head_tokens
    first, size = cards[0], max(1, tokens_at_once(head, wished))
    spans = [slice(start, start + size) for start in range(0, len(losses), size)]
    if len(spans) < 2:
        loss_of_tokens(head, hidden, losses, sums, wished)
        return
    adds = sums.weight is not None or sums.bias is not None
    dealt = cards_of_chunks(len(spans), len(cards), adds=adds)
    version = call.unit.group_of_weight().version
    senders = {
        card.number: _Sender(card, first, head, wished, version, sends=adds)
        for card in cards[1:] if card.number in dealt
    }  # fmt: skip
    here = chunks_of(head, wished) if 0 in dealt else None
    landed = _Landed(first, sums)
    # what is sent later would wait for the sums of the chunks before
    away = [
        sent(hidden[rows], first, cards[number]) if number else None
        for rows, number in zip(spans, dealt, strict=True)
    ]
    begun = first.device.mark()
    for place, (rows, number) in enumerate(zip(spans, dealt, strict=True)):
        inner, away[place] = away[place], None
        if inner is None:
            assert here is not None
            loss_of_chunk(here, head, hidden, rows, losses, sums)
            continue
        found = senders[number].compute(rows, inner, sums)
        for to, source in ((losses, found.losses), (sums.hidden, found.hidden)):
            if to is not None and source is not None:
                _bring(to[rows], source, [found.done, begun], cards[number], first)
        if found.slope is not None and adds:
            senders[number].sent(landed.take(found, hidden[rows], cards[number]))


def _bring(to: Tensor, source: Tensor, after: list[Any], sender: Card, first: Card) -> None:
    first.device.wait_for(first.device.land(to, source, after, sender.device))
    first.counts.landed_bytes += source.nbytes


@dataclass(frozen=True)
class _Found:
    """What a card computed of a chunk of n tokens, there at the point `done`."""

    losses: Tensor  # (n,)
    slope: Tensor | None  # (n, V)
    hidden: Tensor | None  # (n, H), the gradient
    done: Any


class _Landed:
    """Slopes of other cards on the first one, in a ring of buffers that is made when it is needed,
    and what they add up to."""

    def __init__(self, first: Card, sums: TokenSums) -> None:
        self._first, self._sums = first, sums
        self._buffers: list[tuple[Tensor, Any]] = []  # with the point at which it is free
        self._turn = 0

    def take(self, found: _Found, hidden: Tensor, sender: Card) -> Any:
        """Add up what a sender found for hidden (n, H) of the first card, once it is here; return
        the point at which it is."""
        device, slope = self._first.device, found.slope
        assert slope is not None
        if len(self._buffers) < LANDED_SLOPES:
            self._buffers.append((device.landing(slope), device.mark()))
        at = self._turn % LANDED_SLOPES
        buffer, free = self._buffers[at]
        here = buffer[: len(slope)]
        there = device.land(here, slope, [found.done, free], sender.device)
        self._first.counts.landed_bytes += slope.nbytes
        device.wait_for(there)
        self._sums.add(here, hidden)
        self._buffers[at] = buffer, device.mark()
        self._turn += 1
        return there


class _Sender:
    """Another card: computes losses and slopes of some chunks for the first."""

    def __init__(
        self, card: Card, first: Card, head: HeadLoss, wished: int | None, version: int,
        *, sends: bool,
    ) -> None:  # fmt: skip
        self._card, self._sends = card, sends
        self._head = head_on(card, first, head, version)
        with card.computing():
            wait_for_all(card.device, tensors_of(self._head))
            ways = SENT_SLOPES if sends else 1  # slopes wait in one while others are computed
            self._ways = [chunks_of(self._head, wished) for _ in range(ways)]
        self._kept: list[Tensor | None] = [None] * ways
        self._free: list[Any] = [None] * ways  # the point at which each may be written to
        self._turn = 0

    def compute(self, rows: slice, inner: Tensor, sums: TokenSums) -> _Found:
        """Compute the tokens `rows`, whose hidden states (n, H) are on their way here."""
        device = self._card.device
        with self._card.computing():
            wait_for_all(device, [inner])
            if self._free[self._turn] is not None:
                device.wait_for(self._free[self._turn])
            losses = torch.empty(len(inner), dtype=torch.float32, device=inner.device)
            slope = self._ways[self._turn].slope(inner, rows, losses)
            gradient = None
            if slope is not None and sums.hidden is not None:
                gradient = torch.mm(slope, self._head.weight, out=torch.empty_like(inner))
            if slope is not None and self._sends:
                slope = self._in_turn(slope)
            return _Found(losses, slope, gradient, device.mark())

    def _in_turn(self, slope: Tensor) -> Tensor:
        """Return a slope in memory of its turn. In memory of its own, which a copy under way keeps,
        each further chunk would take as much."""
        if isinstance(self._ways[self._turn], FusedChunks) and not self._head.steps:
            return slope  # it is in what the way computes in
        kept = self._kept[self._turn]
        if kept is None:  # of the first chunks, which are the longest
            kept = self._kept[self._turn] = torch.empty_like(slope)
        return kept[: len(slope)].copy_(slope)

    def sent(self, point: Any) -> None:
        """The slopes that were computed last are gone at this point."""
        self._free[self._turn] = point
        self._turn = (self._turn + 1) % len(self._ways)
