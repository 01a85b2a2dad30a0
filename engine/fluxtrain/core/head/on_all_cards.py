"""The head's loss with its chunks of tokens computed by all cards.

Logits, losses and slopes of a token depend on no other token, so any card computes them to the same
bits in chunks of the same tokens. What depends on an order is the sum of the weight's gradient.
With `head_dealing` "in_order" slopes travel to the first card, which adds up all chunks in the
order of one card: the result has one card's bits. With "summed" each card adds up its own chunks,
and the first card adds the sums in the order of the cards: right within the rounding of another
order, and the same in every run. A sum is smaller than the slopes of many chunks, and needs no fast
link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.cards.transfer import send_values
from fluxtrain.core.head.call import HeadCall
from fluxtrain.core.head.steps import Step
from fluxtrain.core.head.token_loss import (
    FusedLogits,
    HeadGradients,
    PlainLogits,
    VocabRange,
    WholeLoss,
    loss_of_chunk,
    loss_of_tokens,
    spans,
)
from fluxtrain.core.runtime.arrivals import note_arrivals, wait_for_all
from fluxtrain.core.runtime.card import EngineCard
from fluxtrain.core.runtime.context import Context
from fluxtrain.plan.dealing import LANDED_SLOPES, SENT_SLOPES, cards_of_chunks

_ADDED_BYTES = 32 << 20  # of a sum that is added at a time


def is_dealt(context: Context, tokens: int) -> bool:
    """Return whether all cards compute a head's loss over so many tokens."""
    return context.plan.head_dealing != "one_card" and tokens >= len(context.cards) > 1


def loss_on_all_cards(
    call: HeadCall, loss: WholeLoss, hidden: Tensor, losses: Tensor, gradients: HeadGradients
) -> None:
    """Compute the result of `loss_of_tokens` on all cards."""
    context, count = call.context, len(losses)
    cards, first = context.cards, context.cards[0]
    in_order = context.plan.head_dealing == "in_order"
    most = loss.logits(hidden, context.head_tokens).tokens
    chunks = spans(count, most if in_order else _even(count, most, len(cards)))
    if len(chunks) < 2:
        loss_of_tokens(loss, hidden, losses, gradients, context.head_tokens)
        return
    size = chunks[0].stop
    adds = in_order and (gradients.weight is not None or gradients.bias is not None)
    dealt = cards_of_chunks(len(chunks), len(cards), adds=adds)
    version = call.unit.group_of_weight().version
    others = {
        card.number: _OtherCard(card, _loss_on(card, first, loss, version), gradients, sends=adds)
        for card in cards[1:] if card.number in dealt
    }  # fmt: skip
    logits = loss.logits(hidden, size)
    landing = _LandedSlopes(first, gradients)
    # what is sent later would wait for the sums of the chunks before
    away = [
        send_values(hidden[chunk], first, cards[number]) if number else None
        for chunk, number in zip(chunks, dealt, strict=True)
    ]
    begun = first.device.mark()
    arrivals: list[Any] = []
    for at, (chunk, number) in enumerate(zip(chunks, dealt, strict=True)):
        inner, away[at] = away[at], None
        if inner is None:
            loss_of_chunk(loss, logits, hidden, chunk, losses, gradients)
            continue
        found = others[number].compute(chunk, inner, size)
        for to, source in ((losses, found.losses), (gradients.hidden, found.hidden)):
            if to is not None and source is not None:
                after = [found.done, begun]
                arrivals.append(_land(first, to[chunk], source, after, cards[number]))
        if found.slope is not None:
            others[number].sent(landing.add(found, hidden[chunk], cards[number]))
    for arrival in arrivals:
        first.device.wait_for(arrival)
    for other in others.values():
        other.add_sums_to(gradients, first)


def _even(count: int, most: int, cards: int) -> int:
    """Return the tokens of a chunk, up to a maximum, with which all cards get equally
    many chunks."""
    chunks = -(-count // most)
    return -(-count // (-(-chunks // cards) * cards))


def _land(
    first: EngineCard, to: Tensor, source: Tensor, after: list[Any], sender: EngineCard
) -> Any:
    """Copy from another card to the first one; return the point of arrival."""
    first.counts.landed_bytes += source.nbytes
    return first.device.land(to, source, after, sender.device)


@dataclass(frozen=True)
class _Found:
    """A card's results for a chunk of n tokens, ready at the point `done`."""

    losses: Tensor  # (n,)
    hidden: Tensor | None  # (n, H), the gradient
    slope: Tensor | None  # (n, V), where the first card adds it up
    done: Any


@dataclass
class _Turn:
    """Memory for a card's logits, while slopes of the chunk before are still being sent."""

    logits: PlainLogits | FusedLogits
    slope: Tensor | None = None
    free: Any = None  # the point at which it may be written to


class _OtherCard:
    """Computes chunks of tokens on another card than the first."""

    def __init__(
        self, card: EngineCard, loss: WholeLoss, gradients: HeadGradients, *, sends: bool
    ) -> None:
        """Begin with a loss whose tensors are on their way to the card.

        `sends`: slopes are added up on the first card, not here. `gradients`: the wanted ones, on
        the first card.
        """
        self._card, self._loss, self._sends = card, loss, sends
        self._for_hidden = gradients.hidden is not None
        self._turns: list[_Turn] = []
        self._at = 0
        with card.computing():
            wait_for_all(card.device, _tensors_of(loss))
            self._sums = HeadGradients()
            if not sends:
                self._sums.weight = _zeros_like(gradients.weight, card)
                self._sums.bias = _zeros_like(gradients.bias, card)

    def compute(self, chunk: slice, inner: Tensor, size: int) -> _Found:
        """Compute a chunk of at most `size` tokens, whose hidden states (n, H) are arriving."""
        device, loss = self._card.device, self._loss
        with self._card.computing():
            wait_for_all(device, [inner])
            turn = self._turn(inner, size)
            if turn.free is not None:
                device.wait_for(turn.free)
            losses = torch.empty(len(inner), dtype=torch.float32, device=inner.device)
            slope = loss.compute(turn.logits, inner, chunk, losses)
            gradient = None
            if slope is not None and self._for_hidden:
                gradient = torch.mm(slope, loss.words.weight, out=torch.empty_like(inner))
            if slope is not None and self._sends:
                slope = self._kept(turn, slope)
            elif slope is not None:
                self._sums.add(slope, inner)
                slope = None
            return _Found(losses, gradient, slope, device.mark())

    def sent(self, point: Any) -> None:
        """Note that the latest slopes have been sent at this point."""
        self._turns[self._at].free = point
        self._at = (self._at + 1) % SENT_SLOPES

    def add_sums_to(self, gradients: HeadGradients, first: EngineCard) -> None:
        """Add this card's sums to those of the first card."""
        done = self._card.device.mark()
        pairs = ((gradients.weight, self._sums.weight), (gradients.bias, self._sums.bias))
        for total, part in pairs:
            if total is not None and part is not None:
                self._add(first, total, part, done)

    def _turn(self, inner: Tensor, size: int) -> _Turn:
        if self._at == len(self._turns):  # the first chunks are the longest
            self._turns.append(_Turn(self._loss.logits(inner, size)))
        return self._turns[self._at]

    def _kept(self, turn: _Turn, slope: Tensor) -> Tensor:
        """Return a slope in the memory of its turn: a copy under way keeps its source, so each
        further chunk would otherwise take as much again."""
        if isinstance(turn.logits, FusedLogits) and not self._loss.steps:
            return slope  # it is in what the logits are computed in
        if turn.slope is None:
            turn.slope = torch.empty_like(slope)
        return turn.slope[: len(slope)].copy_(slope)

    def _add(self, first: EngineCard, total: Tensor, part: Tensor, done: Any) -> None:
        """Add a sum to the first card's, some rows at a time through two buffers."""
        device = first.device
        rows = max(1, _ADDED_BYTES // max(1, part[:1].nbytes))
        free: list[Any] = [device.mark(), device.mark()]
        buffers = [device.landing(part[:rows]) for _ in free]
        for turn, some in enumerate(spans(len(part), rows)):
            at = turn % 2
            buffer = buffers[at][: some.stop - some.start]
            device.wait_for(_land(first, buffer, part[some], [done, free[at]], self._card))
            total[some] += buffer
            free[at] = device.mark()


class _LandedSlopes:
    """Slopes of other cards on the first one, in a ring of buffers allocated on first use, and
    their sums."""

    def __init__(self, first: EngineCard, gradients: HeadGradients) -> None:
        self._first, self._gradients = first, gradients
        self._buffers: list[tuple[Tensor, Any]] = []  # with the point at which it is free
        self._turn = 0

    def add(self, found: _Found, hidden: Tensor, sender: EngineCard) -> Any:
        """Add a card's slopes for hidden (n, H) of the first card, once they arrive; return the
        point of arrival."""
        device, slope = self._first.device, found.slope
        assert slope is not None
        if len(self._buffers) < LANDED_SLOPES:
            self._buffers.append((device.landing(slope), device.mark()))
        at = self._turn % LANDED_SLOPES
        buffer, free = self._buffers[at]
        here = buffer[: len(slope)]
        there = _land(self._first, here, slope, [found.done, free], sender)
        device.wait_for(there)
        self._gradients.add(here, hidden)
        self._buffers[at] = buffer, device.mark()
        self._turn += 1
        return there


def _loss_on(card: EngineCard, first: EngineCard, loss: WholeLoss, version: int) -> WholeLoss:
    """Return the loss on another card, with its tensors on their way."""

    def there(value: Any) -> Any:
        return send_values(value, first, card) if isinstance(value, Tensor) else value

    words = VocabRange(
        weight=_weight_on(card, first, loss.words.weight, version), bias=there(loss.words.bias)
    )
    steps = tuple(Step(step.func, tuple(map(there, step.others))) for step in loss.steps)
    return replace(
        loss, words=words, target=there(loss.target), scale=there(loss.scale), steps=steps
    )


def _tensors_of(loss: WholeLoss) -> list[Tensor]:
    """Return the tensors that a card needs for `loss`."""
    given = [loss.words.weight, loss.words.bias, loss.target, loss.scale]
    given += [other for step in loss.steps for other in step.others]
    return [value for value in given if isinstance(value, Tensor)]


def _weight_on(card: EngineCard, first: EngineCard, weight: Tensor, version: int) -> Tensor:
    """Return the card's copy of this version of the weight, in memory that is kept."""
    kept = card.head_weight
    if kept is not None and kept[0] == version:
        return kept[1]
    buffer = card.device.landing(weight) if kept is None else kept[1]
    # the last loss may still read the buffer
    after = [first.device.mark(), card.device.mark()]
    point = card.device.land(buffer, weight, after, first.device)
    card.counts.landed_bytes += weight.nbytes
    card.head_weight = version, note_arrivals(buffer, [(0, len(buffer))], [point])
    return buffer


def _zeros_like(total: Tensor | None, card: EngineCard) -> Tensor | None:
    if total is None:
        return None
    return torch.zeros(total.shape, dtype=total.dtype, device=card.torch_device)
