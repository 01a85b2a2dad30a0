"""Deal a model's blocks to the cards of a machine, and say what each card's share is. Pure.

Chunks of rows flow through the blocks, so a card works while its neighbours do only where the next
block is on another card. Equal cards get blocks in turn. Unequal ones get numbers by which all are
done at about the same time, spread evenly over the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fluxtrain.errors import BadInput
from fluxtrain.plan.facts import FP32_BYTES, GroupFacts, ModelFacts
from fluxtrain.plan.footprint import HIDDEN_AT_LOSS
from fluxtrain.plan.heads import HeadDealing, logits_bytes
from fluxtrain.plan.request import Dealing, DealingRule

EDGES_CARD = 0  # computes with what stands outside the blocks: embedding, last norm, head
LANDED_SLOPES = 3  # chunks of tokens whose slopes the first card has buffers for
SENT_SLOPES = 2  # the same of a card that sends them
_OF_TWO = (0, 1, 1, 1)  # chunks in turn: to add them all up takes the first as long as half of them


@dataclass(frozen=True, kw_only=True)
class DealtCard:
    """What dealing needs to know about one card."""

    block_s: float | None = None  # to compute one block forward and backward; None: not measured
    memory_bytes: int | None = None  # that blocks may take
    most: int | None = None  # blocks that it holds; None: any number


def deal(blocks: int, cards: Sequence[DealtCard], dealing: Dealing = "auto") -> tuple[int, ...]:
    """Return the card of each block, in the order of the model.

    With more cards than blocks, the first cards get one block each. Together the cards must hold
    all blocks (`most`). Raises BadInput for given numbers that do not add up to the model.
    """
    if isinstance(dealing, tuple):
        check_given(blocks, len(cards), dealing)
        return spread_evenly(dealing)
    return spread_evenly(counts_of(blocks, cards, dealing))


def check_given(blocks: int, cards: int, counts: Sequence[int]) -> None:
    """Raise BadInput unless each card has a number and together they make up all blocks."""
    told = ", ".join(map(str, counts))
    if len(counts) != cards:
        raise BadInput(
            f"parallel.dealing = [{told}] has {len(counts)} numbers for {cards} cards: give one "
            "number of blocks for each card"
        )
    if sum(counts) != blocks:
        even = ", ".join(map(str, counts_of(blocks, [DealtCard()] * cards, "even")))
        raise BadInput(
            f"parallel.dealing = [{told}] deals {sum(counts)} blocks and the model has {blocks}: "
            f"use numbers that make {blocks}, such as [{even}]"
        )


def counts_of(blocks: int, cards: Sequence[DealtCard], rule: DealingRule) -> tuple[int, ...]:
    """Return how many blocks each card gets. Each block goes to the card that then finishes
    earliest (`speed`) or has the smallest share of its memory filled (`memory`); of equal cards to
    the first."""
    each = _load_of_a_block(cards, rule)
    most = [blocks if card.most is None else card.most for card in cards]
    assert sum(most) >= blocks, "the cards do not hold the blocks"
    counts = [min(1, most[at]) if at < blocks else 0 for at in range(len(cards))]
    for _ in range(blocks - sum(counts)):
        open_cards = (at for at in range(len(cards)) if counts[at] < most[at])
        counts[min(open_cards, key=lambda at: ((counts[at] + 1) * each[at], at))] += 1
    return tuple(counts)


def _load_of_a_block(cards: Sequence[DealtCard], rule: DealingRule) -> list[float]:
    """Return the load that one block adds to each card, in any unit."""
    seconds = [card.block_s for card in cards if card.block_s]
    memory = [card.memory_bytes for card in cards if card.memory_bytes]
    if rule in ("auto", "speed") and len(seconds) == len(cards):
        return list(seconds)
    if rule == "memory" and len(memory) == len(cards):
        return [1 / size for size in memory]
    return [1.0] * len(cards)


def spread_evenly(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the card of each block, with `counts` blocks for each card.

    Among the first blocks, however many, each card has its share within one block (a schedule by
    deadlines: R. Tijdeman, The chairman assignment problem, 1980). Blocks then change places where
    two neighbours need not share a card.
    """
    total, given = sum(counts), [0] * len(counts)
    found: list[int] = []
    for at in range(total):
        # the next block of a card may come from `given * total / count` on, and has to come
        # before the one after that would
        may = [c for c, n in enumerate(counts) if given[c] < n and given[c] * total <= at * n]
        last = found[-1] if found else None
        card = min(may, key=lambda c: ((given[c] + 1) * total / counts[c], c == last, c))
        given[card] += 1
        found.append(card)
    return tuple(_neighbours_apart(found))


def _neighbours_apart(cards: list[int]) -> list[int]:
    """Reverse the shortest ranges of blocks for which fewer neighbours share a card."""
    cards = list(cards)
    for at in range(1, len(cards)):
        card = cards[at]
        if cards[at - 1] != card:
            continue
        ends = [None, *cards, None]  # `ends[i]` stands before block i, `ends[i + 2]` behind it
        behind = (
            slice(at, stop + 1)
            for stop in range(at, len(cards))
            if cards[stop] != card != ends[stop + 2]
        )
        before = (
            slice(start, at)
            for start in range(at - 1, -1, -1)
            if cards[start] != card != ends[start]
        )
        found = [one for one in (next(behind, None), next(before, None)) if one is not None]
        if found:
            turned = min(found, key=lambda one: one.stop - one.start)
            cards[turned] = cards[turned][::-1]
    return cards


def runs_of(cards: Sequence[int]) -> list[range]:
    """Return the longest ranges of neighbouring blocks that are each on one card, in order."""
    found: list[range] = []
    for at, card in enumerate(cards):
        if found and cards[found[-1].start] == card:
            found[-1] = range(found[-1].start, at + 1)
        else:
            found.append(range(at, at + 1))
    return found


def cards_of_chunks(chunks: int, cards: int, *, adds: bool) -> list[int]:
    """Return the card that computes each chunk of tokens of a head whose gradient is summed in
    order. `adds`: the gradient exists, and summing it keeps the first card busy."""
    turn = tuple(range(cards))
    if adds and cards > 1:
        turn = _OF_TWO if cards == 2 else turn[1:]
    return [turn[at % len(turn)] for at in range(chunks)]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A model and the card of each of its blocks, in order."""

    facts: ModelFacts
    cards: tuple[int, ...]

    @property
    def number(self) -> int:
        """Return the number of cards that compute."""
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
        """Return the facts of one card's groups; the head's card computes the loss."""
        if card not in self._shares:
            self._shares[card] = self._share(card)
        return self._shares[card]

    @cached_property
    def _shares(self) -> dict[int, ModelFacts]:
        return {}

    def _share(self, card: int) -> ModelFacts:
        if self.number == 1:
            return self.facts
        facts = replace(self.facts, groups=self.groups_of(card))
        if card == EDGES_CARD:
            return facts
        row = facts.row
        return replace(
            facts,
            head_parameters=0,
            head=None,
            adds_on_host=False,  # in buffers that count once, for the first card
            row=None if row is None else replace(row, vocabulary=0, edge_bytes=0),
        )

    def share_with_loss(
        self, card: int, batch_rows: int | None, dealing: HeadDealing
    ) -> ModelFacts:
        """Return the facts of one card's groups where the head's tokens are dealt to all cards. A
        card's memory for the loss (hidden states, logits, sums of the weight's gradient) is free
        again before any block's backward pass, so both use the same memory in turn."""
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
