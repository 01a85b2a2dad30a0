"""What of its share each card keeps in its own memory, within its own budget. Pure arithmetic.

Each card's share is a model by itself to the search for one card: the fastest predicted layout
where rates are known, else the one that the rule prefers. Beside that layout a card holds buffers
for chunks that come from other cards, and a flat sum more for each further block of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.cards.capacity import CardCapacity
from fluxtrain.plan.cards.dealing import runs_of
from fluxtrain.plan.cards.rates import CardsRates
from fluxtrain.plan.cards.shares import EDGES_CARD, Dealt, rates_of_share
from fluxtrain.plan.choices.activations import left_on_device
from fluxtrain.plan.choices.ranked import Frontier
from fluxtrain.plan.choices.reasons import refusal
from fluxtrain.plan.facts import Capacity, ModelFacts, Offload
from fluxtrain.plan.footprint import Footprint, Layout, footprint, slot_count
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import AUTO_SHARE, Search
from fluxtrain.units import GIB, bytes_text

LANES = 2  # compute streams of a card that neighbouring blocks have in turn
LANDING_BUFFERS = 4  # of a whole batch: a chunk arrives in one while others are computed with
LEVELS: tuple[Offload, ...] = (
    "none",
    "optimizer",
    "max",
)  # nothing copied, nothing streamed, least


@dataclass(frozen=True, kw_only=True)
class Settled:
    """One card's share and where its bytes are."""

    card: CardCapacity
    search: Search  # of the share, in what is left beside `beside_bytes`
    layout: Layout
    need: Footprint
    landing_bytes: int
    beside_bytes: int  # with `landing_bytes`, and what runs and the copy of the head take
    longest_run: int
    budget_bytes: int | None  # of the whole card; None without a GPU and a wish

    @property
    def device_bytes(self) -> int:
        """Predicted peak."""
        return self.need.device_bytes + self.beside_bytes

    @property
    def shown_bytes(self) -> int:
        """The peak as it is told and measured: without a GPU the workspace, and with it what is
        beside, is in the heap of the process."""
        if self.card.free_bytes is not None:
            return self.device_bytes
        return self.need.shown_device_bytes(has_gpu=False)

    @property
    def slots(self) -> int:
        """Slots that the card's streamed blocks share."""
        return slot_count(self.search.facts, self.layout)


@dataclass(frozen=True)
class Residency:
    """The question for one batch and its chunks, which `request` has."""

    facts: ModelFacts
    host_available_bytes: int | None
    cards: tuple[CardCapacity, ...]  # those that compute
    rates: CardsRates | None  # of these cards
    request: RunRequest
    share: float = 1.0  # of each card's memory: 1 all that may be used, 0 the least that runs
    head_dealing: HeadDealing = "one_card"

    @cached_property
    def landing_bytes(self) -> int:
        """Bytes of the buffers on each card for chunks that come from others."""
        row, batch = self.facts.row, self.request.batch_rows
        if row is None or batch is None or len(self.cards) == 1:
            return 0
        return LANDING_BUFFERS * batch * row.block_input_bytes

    def budget_bytes(self, card: int) -> int | None:
        """What of a card's memory may be used; None without a GPU and a wish."""
        known = (self.request.budget_bytes, self.cards[card].free_bytes)
        return min((size for size in known if size is not None), default=None)

    def settled(self, dealt: Dealt) -> tuple[Settled, ...]:
        """Place every card's share. Raises DoesNotFit with the card, the numbers and the cure."""
        found = [self._settle(dealt, card, self.host_available_bytes) for card in self._every]
        if self._host_holds(found):
            return tuple(found)
        return self._within_host(dealt, found)

    @property
    def _every(self) -> range:
        return range(len(self.cards))

    def _host_holds(self, found: Sequence[Settled]) -> bool:
        limit = found[0].search.limits.host_bytes
        return limit is None or sum(one.need.host_bytes for one in found) <= limit

    def _within_host(self, dealt: Dealt, wanted: Sequence[Settled]) -> tuple[Settled, ...]:
        """Give each card's groups a part of the host's memory by their size; what one card does
        not need of it is the others'."""
        host = self.host_available_bytes
        assert host is not None
        sizes = [sum(g.host_bytes() for g in dealt.groups_of(card)) for card in self._every]
        try:
            found = [
                self._settle(dealt, card, host * sizes[card] // max(1, sum(sizes)))
                for card in self._every
            ]
        except DoesNotFit:
            found = list(wanted)
        if not self._host_holds(found):
            limit = found[0].search.limits.host_bytes or 0
            raise DoesNotFit(_host_refusal(self, dealt, found, limit))
        return tuple(found)

    def _settle(self, dealt: Dealt, card: int, host_bytes: int | None) -> Settled:
        """Place one card's share; as another card's that is the same in all but names."""
        run, facts = longest_run(dealt, card), self._share(dealt, card)
        rates = None if self.rates is None else self.rates.cards[card]
        alike = (
            *(card == EDGES_CARD, run, host_bytes, self.budget_bytes(card), rates),
            tuple(id(group.unnamed) for group in facts.groups),
        )
        found = self._known.get(alike)
        if found is None:
            found = self._known[alike] = self._settled_anew(dealt, card, host_bytes, run)
        search = replace(found.search, facts=facts)
        return replace(found, card=self.cards[card], search=search)

    @cached_property
    def _known(self) -> dict[tuple[object, ...], Settled]:
        return {}

    def _settled_anew(self, dealt: Dealt, card: int, host_bytes: int | None, run: int) -> Settled:
        found = self._placed(dealt, card, host_bytes, run, self.request)
        if 0 < found.slots <= run:  # each block of a run computes, and one more is copied
            deeper = replace(self.request, prefetch=run)
            found = self._placed(dealt, card, host_bytes, run, deeper)
        return found

    def _placed(
        self, dealt: Dealt, card: int, host_bytes: int | None, run: int, request: RunRequest
    ) -> Settled:
        facts, beside = self._share(dealt, card), self.beside_bytes(dealt, card, run)
        search = self._search(facts, card, host_bytes, beside, request)
        if search is None:
            raise DoesNotFit(self._nothing_left(card, beside))
        layout = self._layout(search, card)
        if layout is None:
            raise DoesNotFit(
                f"{self.cards[card].text}, with {facts.layers} of {self.facts.layers} blocks and "
                f"{bytes_text(beside)} for what passes between cards: {refusal(search)}; or give "
                "it fewer blocks with parallel.dealing, or leave it out of parallel.cards"
            )
        return Settled(
            card=self.cards[card],
            search=search,
            layout=layout,
            need=search.need(layout),
            landing_bytes=self.landing_bytes,
            beside_bytes=beside,
            longest_run=run,
            budget_bytes=self.budget_bytes(card),
        )

    def _search(
        self,
        facts: ModelFacts,
        card: int,
        host_bytes: int | None,
        beside_bytes: int,
        request: RunRequest,
    ) -> Search | None:
        """The search of a share in what a card has left beside; None where that is nothing."""
        budget = self.budget_bytes(card)
        if budget is not None:
            budget -= int(beside_bytes / AUTO_SHARE) + (beside_bytes > 0)
            if budget <= 0:
                return None
        gpu = self.cards[card].free_bytes is not None
        return Search(
            facts,
            Capacity(device_free_bytes=budget if gpu else None, host_available_bytes=host_bytes),
            replace(request, budget_gib=None if gpu or budget is None else budget / GIB),
        )

    def _layout(self, search: Search, card: int) -> Layout | None:
        by_rule = self.rates is None or search.request.offload == "max"
        if self.rates is None or by_rule or not search.capacity.has_gpu:
            layout = search.find()
            limit = search.limits.spare_bytes
            if layout is not None and limit is not None and search.leaves_inputs_on_device(layout):
                return left_on_device(search.facts, layout, limit)
            return layout
        frontier = Frontier(
            search,
            rates_of_share(self.rates.cards[card], card, len(self.cards)),
            clips=not search.request.optimizer_in_backward,
            passes=search.request.passes,
        )
        return frontier.at(self.share).layout if frontier.candidates else None

    def _nothing_left(self, card: int, beside_bytes: int) -> str:
        return (
            f"{self.cards[card].text} needs {bytes_text(beside_bytes)} for what passes between "
            f"cards and {bytes_text(self.budget_bytes(card))} of its memory may be used: use fewer "
            "rows with train.batch_rows, or leave it out of parallel.cards"
        )

    def _share(self, dealt: Dealt, card: int) -> ModelFacts:
        return dealt.share_with_loss(card, self.request.batch_rows, self.head_dealing)

    def beside_bytes(self, dealt: Dealt, card: int, run: int) -> int:
        """Bytes on a card that its layout does not count: landing buffers, flat sums of a run, and
        the copy of the head's weight, which stays."""
        if len(self.cards) == 1:
            return 0
        sums = max((g.sum_bytes for g in dealt.groups_of(card) if g.kind == "block"), default=0)
        copied = self.head_dealing != "one_card" and card != EDGES_CARD
        head = self._head_copy_bytes if copied else 0
        at_once = min(run, LANES) - 1  # further blocks that compute beside one
        return self.landing_bytes + at_once * (sums + self._chunk_bytes) + head

    @cached_property
    def _chunk_bytes(self) -> int:
        """Bytes of the activations that one chunk of a block computes with."""
        row, batch, chunk = self.facts.row, self.request.batch_rows, self.request.chunk_rows
        if row is None or batch is None:
            return 0
        return row.activation_bytes * (batch if chunk == "auto" else min(chunk, batch))

    @cached_property
    def _head_copy_bytes(self) -> int:
        row, head = self.facts.row, self.facts.head_parameters
        if row is None or self.request.batch_rows is None:
            return 0
        return self.facts.head_dtype_bytes * (head or row.hidden * row.vocabulary)

    def most_blocks(self, card: int, level: Offload) -> int:
        """Return how many blocks a card holds at most, all of their bytes (`none`), their weights
        (`optimizer`), or the least that computes them (`max`)."""
        most, least = self.facts.layers, 0
        while least < most:
            middle = (least + most + 1) // 2
            if self._holds(card, level, middle):
                least = middle
            else:
                most = middle - 1
        return least

    def _holds(self, card: int, level: Offload, blocks: int) -> bool:
        other = EDGES_CARD if card else 1
        cards = (card,) * blocks + (other,) * (self.facts.layers - blocks)
        dealt = Dealt(facts=self.facts, cards=cards)
        facts, budget = self._share(dealt, card), self.budget_bytes(card)
        beside = self.beside_bytes(dealt, card, 1)
        search = self._search(facts, card, None, beside, self.request)
        if budget is None or search is None:
            return budget is None
        if not facts.groups:
            return True
        start = next(search.starts(search.heads[0]))
        need = footprint(facts, replace(start, offload=level), has_gpu=search.capacity.has_gpu)
        limit = search.limits.spare_bytes
        return limit is None or need.device_bytes <= limit


def longest_run(dealt: Dealt, card: int) -> int:
    """Return the length of the longest run of neighbouring blocks on a card."""
    runs = (len(run) for run in runs_of(dealt.cards) if dealt.cards[run.start] == card)
    return max(runs, default=1)


def _host_refusal(residency: Residency, dealt: Dealt, found: Sequence[Settled], limit: int) -> str:
    """Say what the host lacks for all cards together, and what would help."""
    needed = sum(one.need.host_bytes for one in found)
    less = _narrower(residency, dealt)
    cure = "close other programs, or take a smaller model or a machine with more memory"
    if less is not None and less <= limit:
        cure = f"train.states=8bit fits with {bytes_text(less)}"
    return (
        f"the model does not fit the host of {len(found)} cards: {bytes_text(needed)} of host "
        f"memory are needed and {bytes_text(limit)} may be used: {cure}"
    )


def _narrower(residency: Residency, dealt: Dealt) -> int | None:
    """Host bytes with optimizer states of 8 bits; None where that cannot be."""
    if not residency.facts.has_masters or not any(g.trained for g in residency.facts.groups):
        return None
    facts = residency.facts.with_states("8bit")
    narrow = replace(residency, facts=facts, host_available_bytes=None)
    try:
        found = narrow.settled(replace(dealt, facts=facts))
    except DoesNotFit:
        return None
    return sum(one.need.host_bytes for one in found)
