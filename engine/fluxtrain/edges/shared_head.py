"""The head's loss with its tokens dealt to all cards.

Each card gets a copy of the weight and an equal range of the tokens, and sums its own gradient of
the weight in fp32. The sums are added on the first card in the order of the cards: the result is
right within the rounding of another order of sums, and the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fluxtrain.edges.chunk_loss import HeadLoss, TokenSums, loss_of_tokens
from fluxtrain.edges.head_call import HeadCall
from fluxtrain.edges.steps import Step
from fluxtrain.handover.carried import sent
from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.cards.pieces import note_pieces, wait_for_all
from fluxtrain.runtime.context import Context

_ADDED_BYTES = 32 << 20  # of a sum that is added at a time


def is_shared(context: Context, tokens: int) -> bool:
    """Tell whether a head's loss over so many tokens is dealt to all cards."""
    return context.plan.head_dealing != "one_card" and tokens >= len(context.cards) > 1


def loss_on_all_cards(
    call: HeadCall, head: HeadLoss, hidden: Tensor, losses: Tensor, sums: TokenSums
) -> None:
    """Compute what `loss_of_tokens` computes, each card a range of the tokens (N,)."""
    cards, count = call.context.cards, len(losses)
    ends = [count * place // len(cards) for place in range(len(cards) + 1)]
    spans = [slice(first, stop) for first, stop in pairwise(ends)]
    first, own = cards[0], spans[0]
    version = call.unit.group_of_weight().version
    elsewhere = [
        _begin(card, first, head, hidden, span, sums, call.context.head_tokens, version)
        for card, span in zip(cards[1:], spans[1:], strict=True)
    ]
    here = replace(head, target=head.target[own])
    loss_of_tokens(here, hidden[own], losses[own], sums.of(own), call.context.head_tokens)
    for share in elsewhere:
        _collect(share, first, losses, sums)


@dataclass(frozen=True)
class _Share:
    """What one card computes of a loss."""

    card: Card
    span: slice
    losses: Tensor
    sums: TokenSums
    done: Any  # the point of its computation


def _begin(
    card: Card,
    first: Card,
    head: HeadLoss,
    hidden: Tensor,
    span: slice,
    sums: TokenSums,
    tokens: int | None,
    version: int,
) -> _Share:
    """Send a card its tokens and its copy of the weight, and let it begin."""
    mine = head_on(card, first, replace(head, target=head.target[span]), version)
    inner = sent(hidden[span].detach(), first, card)
    with card.computing():
        wait_for_all(card.device, [inner, *tensors_of(mine)])
        made = sums.like(inner)
        losses = torch.empty(len(inner), dtype=torch.float32, device=inner.device)
        loss_of_tokens(mine, inner, losses, made, tokens)
        done = card.device.mark()
    return _Share(card, span, losses, made, done)


def head_on(card: Card, first: Card, head: HeadLoss, version: int) -> HeadLoss:
    """Return the same on another card, where its tensors are on their way."""

    def there(tensor: Tensor) -> Tensor:
        return sent(tensor, first, card)

    return replace(
        head,
        weight=_weight_on(card, first, head.weight, version),
        bias=None if head.bias is None else there(head.bias),
        target=there(head.target),
        scale=there(head.scale),
        steps=tuple(
            Step(one.func, tuple(_moved(o, there) for o in one.others)) for one in head.steps
        ),
    )


def tensors_of(head: HeadLoss) -> list[Tensor]:
    """Return what a card must have before it computes with `head`."""
    found = [head.weight, head.target, head.scale]
    found += [o for step in head.steps for o in step.others if isinstance(o, Tensor)]
    return found if head.bias is None else [*found, head.bias]


def _moved(value: Any, there: Any) -> Any:
    return there(value) if isinstance(value, Tensor) else value


def _weight_on(card: Card, first: Card, weight: Tensor, version: int) -> Tensor:
    """Return the card's copy of this version of the weight, in memory that stays."""
    kept = card.head_weight
    if kept is not None and kept[0] == version:
        return kept[1]
    buffer = card.device.landing(weight) if kept is None else kept[1]
    # the last loss may still read the buffer
    after = [first.device.mark(), card.device.mark()]
    point = card.device.land(buffer, weight, after, first.device)
    card.counts.landed_bytes += weight.nbytes
    card.head_weight = version, note_pieces(buffer, [(0, len(buffer))], [point])
    return buffer


def _collect(share: _Share, first: Card, losses: Tensor, sums: TokenSums) -> None:
    """Bring a card's losses and gradients to the first one, and add its sums."""
    device, sender = first.device, share.card.device
    places = [(losses[share.span], share.losses)]
    if sums.hidden is not None and share.sums.hidden is not None:
        places.append((sums.hidden[share.span], share.sums.hidden))
    for to, source in places:
        device.wait_for(device.land(to, source, [share.done, device.mark()], sender))
        first.counts.landed_bytes += source.nbytes
    for total, part in ((sums.weight, share.sums.weight), (sums.bias, share.sums.bias)):
        if total is not None and part is not None:
            _add(share, first, total, part)


def _add(share: _Share, first: Card, total: Tensor, part: Tensor) -> None:
    """Add a card's sum to the first one's, some rows at a time through two buffers."""
    device = first.device
    rows = max(1, _ADDED_BYTES // max(1, part[:1].nbytes))
    free: list[Any] = [device.mark(), device.mark()]
    buffers = [device.landing(part[:rows]) for _ in free]
    for turn, start in enumerate(range(0, len(part), rows)):
        piece, at = part[start : start + rows], turn % 2
        buffer = buffers[at][: len(piece)]
        device.wait_for(device.land(buffer, piece, [share.done, free[at]], share.card.device))
        total[start : start + rows] += buffer
        free[at] = device.mark()
    first.counts.landed_bytes += part.nbytes
