"""The part of a model that one card computes, as facts of a model by itself. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fluxtrain.plan.cost.calibration import Calibration, Line
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import FP32_BYTES, GroupFacts, ModelFacts
from fluxtrain.plan.footprint import HIDDEN_AT_LOSS
from fluxtrain.plan.heads import logits_bytes

EDGES_CARD = 0  # computes with what stands outside the blocks: embedding, last norm, head
_NOTHING = Line(base=0.0, slope=0.0)


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

    def share_with_loss(self, card: int, batch_rows: int | None) -> ModelFacts:
        """Return the facts of one card's groups where the head's tokens are dealt to all cards: the
        sum of the weight's gradient, logits and hidden states are there until the loss is computed,
        before any block's backward pass, so that both have the same memory in turn."""
        share, row, head = self.share(card), self.facts.row, self.facts.head_parameters
        if card == EDGES_CARD or row is None or not batch_rows:
            return share
        logits = logits_bytes(row, batch_rows, row.vocabulary, 0, has_gpu=True)
        hidden = HIDDEN_AT_LOSS * batch_rows * row.block_input_bytes
        return replace(share, loss_bytes=FP32_BYTES * head + logits + hidden)


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
