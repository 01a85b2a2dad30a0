"""Choose the cards, their blocks, the chunks and what each card keeps. Pure.

    placement = place_on_cards(facts, capacities, rates, request, parallel)

Cards are tried in the order of their speed: the fastest alone, then with the next, and so on. The
fewest are taken whose throughput is nearly the best. For each number, batches as for one card; for
a batch, dealings by speed and corrected by memory; for those, each card's residency by the search
for one card; and each of these is simulated. Without rates as many are taken as fit, those with
most memory first, and the rule for one card places each share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fluxtrain.errors import DoesNotFit
from fluxtrain.events.events import CardLeftOut
from fluxtrain.plan.cards.capacity import CardsCapacity, usable_cards
from fluxtrain.plan.cards.dealing import DealtCard, check_given, deal
from fluxtrain.plan.cards.explain import cards_left_out, choices_of_cards, one_card_choice
from fluxtrain.plan.cards.option import Option
from fluxtrain.plan.cards.pipeline import PipelineTime, simulated
from fluxtrain.plan.cards.rates import CardsRates
from fluxtrain.plan.cards.request import ParallelRequest, check_parallel
from fluxtrain.plan.cards.residency import LEVELS, Residency, Settled
from fluxtrain.plan.cards.shares import EDGES_CARD, Dealt
from fluxtrain.plan.cards.work import step_work
from fluxtrain.plan.choices.placement import Placement, place, place_for_any_rows
from fluxtrain.plan.choices.ranked import GPU_CHUNK_TOKENS
from fluxtrain.plan.choices.timed import HIDDEN_SHARE, Timing, place_timed
from fluxtrain.plan.cost.step import passes_s
from fluxtrain.plan.facts import OFFLOADS, Capacity, ModelFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.request import RunRequest, check
from fluxtrain.plan.search import BATCH_LIMIT_ROWS

WORTH_A_CARD = 0.98  # of the best throughput: fewer cards that reach it are preferred
WORTH_ALL_HEADS = 0.99  # of the time with the head dealt less, at most
CHUNKS_A_CARD = 2  # fewer leave cards idle
_DIGITS = 6  # of seconds: of equally fast dealings the one that copies less is taken
SOME_ROWS = 8  # by which cards are compared where the batch is not known


def place_on_cards(
    facts: ModelFacts,
    capacities: CardsCapacity,
    rates: CardsRates | None,
    request: RunRequest,
    parallel: ParallelRequest,
    *,
    share: float = 1.0,
) -> Placement:
    """Decide for all cards of a machine. One card is placed as without others.

    `rates` are of the cards in the order of `capacities`; None leaves all to the rule. `share` of
    each card's memory may be taken above the least that runs.

    Raises BadInput for cards or numbers of blocks that cannot be, DoesNotFit where nothing fits.
    """
    check(request)
    check_parallel(parallel)
    known = rates if facts.row is not None and capacities.has_gpu else None
    return _Chooser(facts, capacities, known, request, parallel, share).placement()


def option_of(
    facts: ModelFacts,
    capacities: CardsCapacity,
    rates: CardsRates,
    request: RunRequest,
    counts: tuple[int, ...],
    *,
    share: float = 1.0,
    head_dealing: HeadDealing = "one_card",
) -> Option:
    """Place and time all cards of `capacities`, in their order, with these numbers of blocks and
    the rows of `request`. Raises DoesNotFit where they do not fit."""
    indices = tuple(card.index for card in capacities.cards)
    parallel = ParallelRequest(cards=indices, dealing=counts)
    chooser = _Chooser(facts, capacities, rates, request, parallel, share)
    assert request.batch_rows is not None and request.chunk_rows != "auto", "a run has its rows"
    return chooser._fastest(
        tuple(range(len(indices))), request.batch_rows, request.chunk_rows, head_dealing
    )  # fmt: skip


@dataclass(frozen=True)
class _Chooser:
    facts: ModelFacts
    capacities: CardsCapacity
    rates: CardsRates | None
    request: RunRequest
    parallel: ParallelRequest
    share: float

    def placement(self) -> Placement:
        """The fastest placement that is worth its cards."""
        if isinstance(self.parallel.dealing, tuple):
            check_given(self.facts.layers, len(self._usable), self.parallel.dealing)
        options, refused = self._options()
        if not options:
            raise refused[-1]
        chosen = self._chosen(options)
        if chosen.alone is not None:
            told = one_card_choice(self.parallel, self.capacities, options, chosen)
            choices = (*told, *chosen.alone.choices)
            several = self.capacities.has_gpu and len(self.capacities.cards) > 1
            card = self.capacities.cards[chosen.positions[0]].index if several else None
            left_out = self._left_out(options, chosen)
            return replace(chosen.alone, card=card, choices=choices, left_out=left_out)
        rivals = list(self._rivals(chosen))
        best = min([chosen, *rivals], key=lambda one: one.step_s)
        choices = choices_of_cards(
            self.parallel, self.capacities, self.request, [*options, *rivals], best
        )
        return replace(best.placement(choices), left_out=self._left_out(options, best))

    def _left_out(self, options: list[Option], chosen: Option) -> tuple[CardLeftOut, ...]:
        return cards_left_out(self.parallel, self.capacities, options, chosen)

    def _options(self) -> tuple[list[Option], list[DoesNotFit]]:
        """The best option of each number of cards that fits, and why others do not."""
        options: list[Option] = []
        refused: list[DoesNotFit] = []
        for number in self._numbers:
            try:
                options.append(self._best_of(self._cards[:number]))
            except DoesNotFit as error:
                refused.append(error)
                continue
            if self.rates is None:
                break  # of placements without times the one with the most cards is taken
        return options, refused

    @cached_property
    def _cards(self) -> tuple[int, ...]:
        return self._usable[: max(1, self.facts.layers)]

    @cached_property
    def _usable(self) -> tuple[int, ...]:
        return usable_cards(self.capacities, self.parallel, self.block_s)

    @property
    def _numbers(self) -> list[int]:
        every = len(self._cards)
        asked = self.parallel.cards != "auto" or isinstance(self.parallel.dealing, tuple)
        if asked:
            return [every]
        if self.rates is None and not self.capacities.has_gpu:
            return [1]  # the same cores would do the work of all cards
        fewest_first = range(1, every + 1)
        return list(fewest_first if self.rates is not None else reversed(fewest_first))

    @cached_property
    def block_s(self) -> tuple[float | None, ...]:
        """Seconds of one block forward and backward on each card of the machine."""
        if self.rates is None:
            return (None,) * len(self.capacities.cards)
        rows = self.request.batch_rows or SOME_ROWS
        chunk = rows if self.request.chunk_rows == "auto" else self.request.chunk_rows
        layout = Layout(offload="none", batch_rows=rows, chunk_rows=chunk)
        passes = (passes_s(self.facts, layout, card) for card in self.rates.cards)
        layers = max(1, self.facts.layers)
        return tuple((forward + backward) / layers for forward, _, backward in passes)

    def _chosen(self, options: list[Option]) -> Option:
        """The fewest cards that are nearly as fast as any."""
        best = max(one.tokens_per_s for one in options)
        return next(one for one in options if one.tokens_per_s >= WORTH_A_CARD * best)

    def _best_of(self, positions: tuple[int, ...]) -> Option:
        if len(positions) == 1:
            return self._alone(positions[0])
        found: list[Option] = []
        refused: DoesNotFit | None = None
        for batch in self._batches:
            try:
                found.append(self._fastest(positions, batch, self._chunk(batch, len(positions))))
            except DoesNotFit as error:
                refused = error
            if found and self.rates is None:
                break
        if not found:
            assert refused is not None
            raise refused
        best = max(one.tokens_per_s for one in found)
        return next(one for one in reversed(found) if one.tokens_per_s >= HIDDEN_SHARE * best)

    @property
    def _batches(self) -> list[int]:
        """The largest first; 0 where no rows are known."""
        if self.facts.row is None:
            return [0]
        if self.request.batch_rows is not None:
            return [self.request.batch_rows]
        most = min(BATCH_LIMIT_ROWS, max(1, self.request.data_rows or BATCH_LIMIT_ROWS))
        return [1 << shift for shift in range(most.bit_length() - 1, -1, -1)]

    def _chunk(self, batch: int, number: int) -> int:
        """Rows of a chunk: enough chunks to keep so many cards busy."""
        if self.request.chunk_rows != "auto":
            return min(self.request.chunk_rows, batch) if batch else self.request.chunk_rows
        return min(self._most_rows, _power_of_two(batch // (CHUNKS_A_CARD * number)))

    @property
    def _most_rows(self) -> int:
        length = 1 if self.facts.row is None else self.facts.row.sequence_length
        return _power_of_two(GPU_CHUNK_TOKENS // length)

    def _rivals(self, chosen: Option) -> Iterator[Option]:
        """The same cards and batch with other chunks, and the head on all cards."""
        if chosen.time is None:
            return
        batch, here = chosen.layout.batch_rows, chosen.layout.chunk_rows
        best = chosen
        if self.request.chunk_rows == "auto":
            for rows in {2 * here, 4 * here, here // 2, here // 4}:
                if 1 <= rows <= min(batch, self._most_rows):
                    for other in self._fitting(chosen.positions, batch, rows):
                        yield other
                        best = min(best, other, key=lambda one: one.step_s)
        if _head_is_whole(best):
            rows = best.layout.chunk_rows
            for dealing in self._head_dealings(chosen.positions):
                for other in self._fitting(chosen.positions, batch, rows, dealing):
                    if other.step_s < WORTH_ALL_HEADS * best.step_s:
                        yield other
                        best = other

    def _head_dealings(self, positions: tuple[int, ...]) -> Iterator[HeadDealing]:
        """Yield ways to deal the head. Slopes go to the first card by links alone: through the host
        they would take as much of its memory as there are chunks."""
        assert self.rates is not None
        peers = self.rates.of(positions).peers
        linked = all((card, EDGES_CARD) in peers for card in range(1, len(positions)))
        if linked or not self.facts.head_parameters:
            yield "in_order"
        if self.parallel.order == "fast":
            yield "summed"

    def _fitting(
        self, positions: tuple[int, ...], batch: int, chunk: int, dealing: HeadDealing = "one_card"
    ) -> Iterator[Option]:
        try:
            yield self._fastest(positions, batch, chunk, dealing)
        except DoesNotFit:
            return

    def _alone(self, position: int) -> Option:
        """One card, placed as where there is no other."""
        card = self.capacities.cards[position]
        capacity = Capacity(
            device_free_bytes=card.free_bytes,
            host_available_bytes=self.capacities.host_available_bytes,
        )
        timing = None
        if self.rates is not None:
            timing = Timing(
                rates=self.rates.cards[position],
                clips=not self.request.optimizer_in_backward,
                passes=self.request.passes,
                share=self.share,
            )
        if self.facts.row is None:
            alone = place_for_any_rows(self.facts, capacity, self.request)
        elif timing is None:
            alone = place(self.facts, capacity, self.request)
        else:
            alone = place_timed(self.facts, capacity, self.request, timing)
        dealt = Dealt(facts=self.facts, cards=(0,) * self.facts.layers)
        time = self._time((position,), dealt, [alone.layout], "one_card")
        return Option(positions=(position,), dealt=dealt, settled=(), time=time, alone=alone)

    def _fastest(
        self, positions: tuple[int, ...], batch: int, chunk: int, dealing: HeadDealing = "one_card"
    ) -> Option:
        """The fastest dealing of a batch and its chunks. Raises DoesNotFit where none fits."""
        residency = Residency(
            self.facts,
            self.capacities.host_available_bytes,
            tuple(self.capacities.cards[at] for at in positions),
            None if self.rates is None else self.rates.of(positions),
            replace(
                self.request,
                batch_rows=batch or None,
                chunk_rows=chunk or "auto",
                head=self.request.head if dealing == "one_card" else "whole",
            ),
            self.share,
            dealing,
        )
        found: list[Option] = []
        refused: DoesNotFit | None = None
        for dealt in self._dealings(residency, positions):
            try:
                found.append(self._timed(positions, dealt, residency))
            except DoesNotFit as error:
                refused = refused or error
        if not found:
            assert refused is not None
            raise refused
        return min(
            found, key=lambda one: (round(one.step_s, _DIGITS), OFFLOADS.index(one.layout.offload))
        )

    def _dealings(self, residency: Residency, positions: tuple[int, ...]) -> list[Dealt]:
        """Ways to deal the blocks: as asked, and the same as far as the cards hold all bytes of
        their blocks, their weights, or what is needed to compute them."""
        number, layers = len(positions), self.facts.layers
        dealing = self.parallel.dealing
        plain = [
            DealtCard(block_s=self.block_s[at], memory_bytes=residency.budget_bytes(card))
            for card, at in enumerate(positions)
        ]
        found = {deal(layers, plain, dealing): None}
        for level in LEVELS if not isinstance(dealing, tuple) else ():
            most = [residency.most_blocks(card, level) for card in range(number)]
            if sum(most) < layers or min(most) < 1:
                continue
            held = [replace(card, most=n) for card, n in zip(plain, most, strict=True)]
            capped = deal(layers, held, dealing)
            found.setdefault(capped, None)
            if self.rates is None and level == "none":
                found = {capped: None}  # without times what streams nothing comes first
                break
        return [Dealt(facts=self.facts, cards=cards) for cards in found]

    def _timed(self, positions: tuple[int, ...], dealt: Dealt, residency: Residency) -> Option:
        settled = residency.settled(dealt)
        head = residency.head_dealing
        option = Option(positions=positions, dealt=dealt, settled=settled, head_dealing=head)
        if self.rates is None:
            return option
        at_once, later = (
            replace(option, settled=_with_moments(settled, deferred=deferred))
            for deferred in (False, True)
        )
        now, then = (
            replace(one, time=self._time(positions, dealt, [s.layout for s in one.settled], head))
            for one in (at_once, later)
        )
        asked = self.request.deferred_moments
        if self.request.optimizer_in_backward or asked is False:
            return now
        # Any gain will do: a host that is slower beside AdamW than when it was timed, as virtual
        # ones are at times, then holds the forward pass up less.
        return then if asked or then.step_s < now.step_s else now

    def _time(
        self, positions: tuple[int, ...], dealt: Dealt, layouts: list[Layout], head: HeadDealing
    ) -> PipelineTime | None:
        if self.rates is None:
            return None
        rates = self.rates.of(positions)
        work = step_work(
            dealt,
            layouts,
            rates,
            clips=not self.request.optimizer_in_backward,
            passes=self.request.passes,
            head_dealing=head,
        )
        packed = any(group.dense_bytes for group in self.facts.groups)
        return simulated(work, rates, runs_by_chunks=not packed)


def _with_moments(settled: tuple[Settled, ...], *, deferred: bool) -> tuple[Settled, ...]:
    """The same with AdamW's moments after all weights on every card, or on none."""
    return tuple(
        replace(one, layout=replace(one.layout, deferred_moments=deferred)) for one in settled
    )


def _head_is_whole(option: Option) -> bool:
    """Is the head's weight on its card at once, so that others can have a copy?"""
    return option.layout.head == "whole"


def _power_of_two(rows: int) -> int:
    """The largest that is no more than `rows`; at least 1."""
    return 1 << (max(1, rows).bit_length() - 1)
