"""The part of a model that one card computes, as facts of a model by itself. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fluxtrain.plan.cost.calibration import Calibration, Line
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import FP32_BYTES, GroupFacts, ModelFacts
from fluxtrain.plan.footprint import HIDDEN_AT_LOSS
from fluxtrain.plan.heads import HeadDealing, logits_bytes

EDGES_CARD = 0  # computes with what stands outside the blocks: embedding, last norm, head
LANDED_SLOPES = 3  # chunks of tokens whose slopes the first card has buffers for
SENT_SLOPES = 2  # the same of a card that sends them
_OF_TWO = (0, 1, 1, 1)  # chunks in turn: to add them all up takes the first as long as half of them
_NOTHING = Line(base=0.0, slope=0.0)


def cards_of_chunks(chunks: int, cards: int, *, adds: bool) -> list[int]:
    """Return the card that computes each chunk of tokens of a head whose gradient is summed in
    order. `adds`: there is a gradient, and the first card is kept busy by adding it up."""
    turn = tuple(range(cards))
    if adds and cards > 1:
        turn = _OF_TWO if cards == 2 else turn[1:]
    return [turn[at % len(turn)] for at in range(chunks)]


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A model and the card of each of its blocks, in order."""

    facts: ModelFacts
    cards: tuple[int, ...]

    @property
    def number(self) -> int:
        """How many cards compute."""
        return max(self.cards, default=0) + 1

    def of_groups(self) -> tuple[int, ...]:
        """Return the card of each group, in forward order."""
        dealt = iter(self.cards)
        return tuple(
            next(dealt) if group.kind == "block" else EDGES_CARD for group in self.facts.groups
        )

    def groups_of(self, card: int) -> tuple[GroupFacts, ...]:
        """Return the groups of one card, in forward order."""
        both = zip(self.facts.groups, self.of_groups(), strict=True)
        return tuple(group for group, at in both if at == card)

    def share(self, card: int) -> ModelFacts:
        """Return the facts of one card's groups; the loss is computed where the head is."""
        facts = replace(self.facts, groups=self.groups_of(card))
        if card == EDGES_CARD:
            return facts
        row = facts.row
        return replace(
            facts,
            head_parameters=0,
            head=None,
            row=None if row is None else replace(row, vocabulary=0, edge_bytes=0),
        )

    def share_with_loss(
        self, card: int, batch_rows: int | None, dealing: HeadDealing
    ) -> ModelFacts:
        """Return the facts of one card's groups where the head's tokens are dealt to all cards:
        what a card has for the loss (hidden states, logits, sums of the weight's gradient) is there
        until it is computed, before any block's backward pass, so that both have the same memory in
        turn."""
        share, row, head = self.share(card), self.facts.row, self.facts.head_parameters
        first = card == EDGES_CARD
        if row is None or not batch_rows or dealing == "one_card":
            return share
        if dealing == "summed" and first:
            return share
        logits = logits_bytes(row, batch_rows, row.vocabulary, 0, has_gpu=True)
        hidden = HIDDEN_AT_LOSS * batch_rows * row.block_input_bytes
        if dealing == "summed" or first:
            hidden += FP32_BYTES * head
        if dealing == "in_order" and head:  # slopes travel
            logits *= 1 + LANDED_SLOPES if first else SENT_SLOPES
        return replace(share, loss_bytes=hidden + logits)


def rates_of_share(rates: Rates, card: int, number: int) -> Rates:
    """Return the rates by which one of `number` cards does its share as if it were all: the host
    serves all cards, so each has its part of AdamW and of the thread that queues."""
    if number == 1:
        return rates
    narrower: dict[str, Any] = {
        name: None if value is None else value / number
        for name in _HOST_RATES
        for value in [getattr(rates, name)]
    }
    tried = rates.calibration
    return replace(
        rates,
        **narrower,
        calibration=None if tried is None else _of_share(tried, card, number),
    )


_HOST_RATES = (
    *("adamw_per_s", "adamw_8bit_per_s", "adamw_weights_per_s", "adamw_moments_per_s"),
    *("adamw_beside_per_s", "adamw_8bit_beside_per_s"),
)


def _of_share(tried: Calibration, card: int, number: int) -> Calibration:
    host = tried.host
    outside: dict[str, Any] = (
        {} if card == EDGES_CARD else {"outside_forward": _NOTHING, "outside_backward": _NOTHING}
    )
    return replace(
        tried,
        **outside,
        host_block_s=number * tried.host_block_s,
        host_forward_s=number * tried.host_forward_s,
        host=None
        if host is None
        else replace(
            host,
            forward=host.forward.times(number),
            backward=host.backward.times(number),
            forward_beside=host.forward_beside.times(number),
            backward_beside=host.backward_beside.times(number),
        ),
    )
