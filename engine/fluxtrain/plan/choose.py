"""Choose the cards, their blocks, the batch, its chunks, and what each card keeps. Pure.

    placement = place(facts, capacities, request, parallel, rates=rates)

The rule, where no times are known, in this order:

1. The budget is `budget_bytes`, or the free device memory if that is less. Automatic choices plan
   with 90 % of it (the rest is for fragmentation and libraries), explicit ones with all of it; so
   with the available host memory. Without rows what does not depend on them may take half.
2. Batch: the largest power of two, 32 at most and no more than the data's rows (one step an epoch),
   for which some layout but `max` fits; `max` only where no batch fits otherwise.
3. Chunk: rows for about 4096 tokens, enough to keep a GPU busy; halved until some layout fits.
4. Offload: `none` if it fits, else `weights`: first as many groups as fit live on the device with
   their gradients and optimizer states, then as many of the other blocks' weights. Without a GPU
   `auto` means `weights` (or `max`) with nothing on the device: the blocks stream for real.

With rates, cards are tried in the order of their speed: the fastest alone, then with the next, and
so on; the fewest are taken whose throughput is nearly the best. For each number of cards the
smallest batch is taken that reaches nearly the tokens a second of the best: beyond it the copies
are hidden, and a larger batch only means fewer updates. For a batch, blocks are dealt by speed and
corrected by memory, `TimedSearch` says what each card keeps of its share, and the step of all cards
is simulated. Without rates as many cards are taken as fit, those with most memory first.

Nothing fits: `DoesNotFit` says what is needed, what there is and which setting would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity, DiskHome, usable_cards
from fluxtrain.plan.dealing import (
    EDGES_CARD,
    Assignment,
    DealtCard,
    check_given,
    deal,
    runs_of,
)
from fluxtrain.plan.depths import LANES
from fluxtrain.plan.facts import OFFLOADS, Capacity, ModelFacts, Offload
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    footprint,
    kept_count,
    left_on_device,
)
from fluxtrain.plan.group_placement import GroupPlacement, disk_counts, table_of
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.placement import (
    CardLayout,
    CardPlacement,
    Option,
    Placement,
    exact_layout,
)
from fluxtrain.plan.rates import CardsRates, Rates
from fluxtrain.plan.reasons import (
    HIDDEN_TIMES,
    cards_left_out,
    choices_of,
    host_refusal,
    refusal,
    trains_adapters,
)
from fluxtrain.plan.request import ParallelRequest, RunRequest, check, check_parallel, count_or
from fluxtrain.plan.search import (
    AUTO_SHARE,
    BATCH_LIMIT_ROWS,
    GPU_CHUNK_TOKENS,
    Search,
    TimedSearch,
    power_of_two,
)
from fluxtrain.plan.simulation import StepTime, simulated
from fluxtrain.plan.work import computing_s, step_work
from fluxtrain.units import GIB, bytes_text

WORTH_A_CARD = 0.98  # of the best throughput: fewer cards that reach it are preferred
WORTH_ALL_HEADS = 0.99  # of the time with the head dealt less, at most
HIDDEN_SHARE = 0.95  # of the best batch's tokens a second
ADAPTERS_SHARE = 0.9  # the same of adapters, where the copies are hidden twice over
CHUNKS_A_CARD = 2  # fewer leave cards idle
SOME_ROWS = 8  # by which cards are compared where the batch is not known
LANDING_BUFFERS = 4  # of a whole batch: a chunk arrives in one while others are computed with
LEVELS: tuple[Offload, ...] = ("none", "optimizer", "max")  # nothing copied, or streamed; least
_DIGITS = 6  # of seconds: of equally fast dealings the one that copies less is taken


def place(
    facts: ModelFacts,
    capacities: CardsCapacity | Capacity,
    request: RunRequest,
    parallel: ParallelRequest | None = None,
    *,
    rates: CardsRates | Rates | None = None,
    share: float = 1.0,
    disk: DiskHome | None = None,
    spill: DiskHome | None = None,
) -> Placement:
    """Decide for all cards of a machine, or for the only one that is known.

    `rates` are of the cards in the order of `capacities`; None leaves all to the rule. `share` of
    each card's memory may be taken above the least that runs. `disk` is where frozen weights live
    that the host cannot hold, `spill` where optimizer states do; None: nowhere.

    Raises BadInput for cards or numbers of blocks that cannot be, DoesNotFit where nothing fits.
    """
    parallel = parallel or ParallelRequest()
    check(request)
    check_parallel(parallel)
    if request.batch_rows is not None and request.batch_rows < 1:
        raise BadInput(f"batch_rows is {request.batch_rows}: use at least 1, or leave it out")
    if isinstance(capacities, Capacity):
        card = CardCapacity(index=0, free_bytes=capacities.device_free_bytes)
        host_bytes = capacities.host_available_bytes
        capacities = CardsCapacity(cards=(card,), host_available_bytes=host_bytes)
    if (most := request.host_bytes) is not None:
        known_bytes = capacities.host_available_bytes
        host_bytes = most if known_bytes is None else min(most, known_bytes)
        capacities = replace(capacities, host_available_bytes=host_bytes)
    if isinstance(rates, Rates):
        rates = CardsRates(cards=(rates,))
    known = rates if facts.row is not None and capacities.has_gpu else None
    return _Chooser(facts, capacities, known, request, parallel, share, disk, spill).placement()


@dataclass(frozen=True)
class _Chooser:
    facts: ModelFacts
    capacities: CardsCapacity
    rates: CardsRates | None
    request: RunRequest
    parallel: ParallelRequest
    share: float
    disk: DiskHome | None
    spill: DiskHome | None

    def placement(self) -> Placement:
        """Return the fastest placement that is worth its cards."""
        if isinstance(self.parallel.dealing, tuple):
            check_given(self.facts.layers, len(self._usable), self.parallel.dealing)
        options: list[Option] = []
        refused: list[DoesNotFit] = []
        for number in self._numbers:
            try:
                options += self._options_of(self._cards[:number])
            except DoesNotFit as error:
                refused.append(error)
                continue
            if self.rates is None:
                break  # of placements without times the one with the most cards is taken
        if not options:
            raise refused[-1]
        chosen = self._chosen(options)
        rivals = list(self._rivals(chosen))
        options += rivals
        best = min([chosen, *rivals], key=lambda one: one.step_s)
        return self._placed(best, options)

    def _placed(self, best: Option, options: Sequence[Option]) -> Placement:
        cards = tuple(_card_placement(one) for one in best.cards)
        if len(cards) == 1 and (len(self.capacities.cards) == 1 or not self.capacities.has_gpu):
            cards = (replace(cards[0], index=None),)  # there is no other than the current one
        asked = (self.parallel, self.capacities, self.request)
        return Placement(
            groups=_rows(best),
            layout=best.layout,
            need=_need(best),
            cards=cards,
            spill_folder=self.spill.folder if self.spill and best.layout.disk_states else "",
            choices=choices_of(*asked, options, best),
            left_out=cards_left_out(self.parallel, self.capacities, options, best),
            head_dealing=best.head_dealing,
            time=best.time,
        )

    @cached_property
    def _cards(self) -> tuple[int, ...]:
        return self._usable[: max(1, self.facts.layers)]

    @cached_property
    def _usable(self) -> tuple[int, ...]:
        return usable_cards(self.capacities, self.parallel, self.block_s)

    @property
    def _numbers(self) -> list[int]:
        every = len(self._cards)
        if self.parallel.cards != "auto" or isinstance(self.parallel.dealing, tuple):
            return [every]
        if self.rates is None and not self.capacities.has_gpu:
            return [1]  # the same cores would do the work of all cards
        fewest_first = range(1, every + 1)
        return list(fewest_first if self.rates is not None else reversed(fewest_first))

    @cached_property
    def block_s(self) -> tuple[float | None, ...]:
        """Return the seconds of one block forward and backward on each card of the machine."""
        if self.rates is None:
            return (None,) * len(self.capacities.cards)
        rows = self.request.batch_rows or SOME_ROWS
        chunk = rows if self.request.chunk_rows == "auto" else self.request.chunk_rows
        layout = Layout(offload="none", batch_rows=rows, chunk_rows=chunk)
        times = (computing_s(self.facts, layout, card) for card in self.rates.cards)
        layers = max(1, self.facts.layers)
        return tuple((forward + backward) / layers for forward, _, backward in times)

    def _chosen(self, options: list[Option]) -> Option:
        """Return the fewest cards that are nearly as fast as any number, with their batch."""
        found = []
        for number in dict.fromkeys(len(one.cards) for one in options):
            found.append(_smallest_batch([one for one in options if len(one.cards) == number]))
        best = max(one.tokens_per_s for one in found)
        return next(one for one in found if one.tokens_per_s >= WORTH_A_CARD * best)

    # -- rows --------------------------------------------------------------------------------------

    def _options_of(self, positions: tuple[int, ...]) -> list[Option]:
        """Return the fastest option of each batch, the largest first, down to the smallest batch
        that may be nearly as fast."""
        found: list[Option] = []
        refused: DoesNotFit | None = None
        for batch in self._batches(positions):
            near = found[-1] if found else None
            try:
                chunk = self._chunk(batch, len(positions))
                found.append(self.fastest(positions, batch, chunk, near=near))
            except DoesNotFit as error:
                refused = error
                continue
            best = max(one.tokens_per_s for one in found)
            if self.rates is None or found[-1].tokens_per_s < ADAPTERS_SHARE * best:
                break
        if not found:
            assert refused is not None
            raise refused
        return found

    def _batches(self, positions: tuple[int, ...]) -> list[int]:
        """Return the batches to try, the largest first; 0 where no rows are known."""
        if self.facts.row is None:
            return [0]
        if self.request.batch_rows is not None:
            return [self.request.batch_rows]
        most = min(BATCH_LIMIT_ROWS, max(1, self.request.data_rows or BATCH_LIMIT_ROWS))
        if len(positions) == 1:  # no more than fit without `max`
            search = self._shares(positions, 0, 0, "one_card").alone
            ruled = search.find()
            if ruled is None:
                raise DoesNotFit(refusal(search))
            most = ruled.batch_rows
        return [1 << shift for shift in range(most.bit_length() - 1, -1, -1)]

    def _chunk(self, batch: int, number: int) -> int:
        """Return the rows of a chunk, small enough that all cards have work; 0: the search of one
        card decides."""
        if self.request.chunk_rows != "auto":
            return min(self.request.chunk_rows, batch) if batch else self.request.chunk_rows
        if number == 1:
            return 0
        return min(self._most_rows, power_of_two(batch // (CHUNKS_A_CARD * number)))

    @property
    def _most_rows(self) -> int:
        length = 1 if self.facts.row is None else self.facts.row.sequence_length
        return power_of_two(GPU_CHUNK_TOKENS // length)

    def _rivals(self, chosen: Option) -> Iterator[Option]:
        """Yield options with the same cards and batch, but other chunks or the head on all
        cards."""
        if chosen.time is None or len(chosen.cards) == 1:
            return
        batch, here = chosen.layout.batch_rows, chosen.layout.chunk_rows
        best = chosen
        if self.request.chunk_rows == "auto":
            for rows in {2 * here, 4 * here, here // 2, here // 4}:
                if 1 <= rows <= min(batch, self._most_rows):
                    for other in self._fitting(chosen, rows):
                        yield other
                        best = min(best, other, key=lambda one: one.step_s)
        if best.layout.head == "whole":  # on its card at once, so that others can have a copy
            for dealing in self._head_dealings(chosen.positions):
                for other in self._fitting(chosen, best.layout.chunk_rows, dealing):
                    if other.step_s < WORTH_ALL_HEADS * best.step_s:
                        yield other
                        best = other

    def _head_dealings(self, positions: tuple[int, ...]) -> Iterator[HeadDealing]:
        """Yield ways to deal the head. Gradients of the logits reach the first card only by links
        between cards: through the host they would take host memory for every chunk."""
        assert self.rates is not None
        peers = self.rates.of(positions).peers
        linked = all((card, EDGES_CARD) in peers for card in range(1, len(positions)))
        if linked or not self.facts.head_parameters:
            yield "in_order"
        if self.parallel.order == "fast":
            yield "summed"

    def _fitting(
        self, near: Option, chunk: int, dealing: HeadDealing = "one_card"
    ) -> Iterator[Option]:
        try:
            yield self.fastest(near.positions, near.layout.batch_rows, chunk, dealing, near=near)
        except DoesNotFit:
            return

    # -- blocks ------------------------------------------------------------------------------------

    def _shares(
        self,
        positions: tuple[int, ...],
        batch: int,
        chunk: int,
        dealing: HeadDealing,
        near: Option | None = None,
    ) -> _CardSearch:
        return _CardSearch(
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
            near,
            self.disk,
            self.spill,
        )

    def fastest(
        self,
        positions: tuple[int, ...],
        batch: int,
        chunk: int,
        dealing: HeadDealing = "one_card",
        near: Option | None = None,
    ) -> Option:
        """Return the fastest way to deal the blocks for a batch and its chunks. Raises DoesNotFit
        where none fits."""
        shares = self._shares(positions, batch, chunk, dealing, near)
        found: list[Option] = []
        refused: DoesNotFit | None = None
        for dealt in self._dealings(shares, positions):
            try:
                found.append(self._timed(positions, dealt, shares))
            except DoesNotFit as error:
                refused = refused or error
        if not found:
            assert refused is not None
            raise refused
        return min(
            found, key=lambda one: (round(one.step_s, _DIGITS), OFFLOADS.index(one.layout.offload))
        )

    def _dealings(self, shares: _CardSearch, positions: tuple[int, ...]) -> list[Assignment]:
        """Return ways to deal the blocks: as asked, and with as many blocks a card as it can hold
        whole, by weights alone, or with the least that computes them."""
        number, layers = len(positions), self.facts.layers
        if number == 1:
            return [Assignment(facts=self.facts, cards=(EDGES_CARD,) * layers)]
        dealing = self.parallel.dealing
        plain = [
            DealtCard(block_s=self.block_s[at], memory_bytes=shares.budget_bytes(card))
            for card, at in enumerate(positions)
        ]
        found = {deal(layers, plain, dealing): None}
        for level in LEVELS if not isinstance(dealing, tuple) else ():
            most = [shares.most_blocks(card, level) for card in range(number)]
            if sum(most) < layers or min(most) < 1:
                continue
            held = [replace(card, most=n) for card, n in zip(plain, most, strict=True)]
            capped = deal(layers, held, dealing)
            found.setdefault(capped, None)
            if self.rates is None and level == "none":
                found = {capped: None}  # without times what streams nothing comes first
                break
        return [Assignment(facts=self.facts, cards=cards) for cards in found]

    def _timed(self, positions: tuple[int, ...], dealt: Assignment, shares: _CardSearch) -> Option:
        cards = shares.placed(dealt)
        option = Option(
            positions=positions,
            dealt=dealt,
            cards=cards,
            layout=_layout_of(dealt, cards, self.request),
            head_dealing=shares.head_dealing,
        )
        if self.rates is None:
            return option
        if len(cards) == 1:
            return replace(option, time=self._time(option))
        now, then = (self._with_moments(option, deferred=late) for late in (False, True))
        asked = self.request.deferred_moments
        if self.request.optimizer_in_backward or asked is False:
            return now
        # Any gain will do: a host that is slower during AdamW than when it was timed, as virtual
        # ones are at times, then holds the forward pass up less.
        return then if asked or then.step_s < now.step_s else now

    def _with_moments(self, option: Option, *, deferred: bool) -> Option:
        """Return the option with AdamW's moments updated after all weights on every card, or on
        none."""
        cards = tuple(
            replace(one, layout=replace(one.layout, deferred_moments=deferred))
            for one in option.cards
        )
        layout = replace(option.layout, deferred_moments=deferred)
        changed = replace(option, cards=cards, layout=layout)
        return replace(changed, time=self._time(changed))

    def _time(self, option: Option) -> StepTime:
        assert self.rates is not None
        rates = self.rates.of(option.positions)
        work = step_work(
            option.dealt,
            [one.layout for one in option.cards],
            rates,
            clips=not self.request.optimizer_in_backward,
            passes=self.request.passes,
            head_dealing=option.head_dealing,
        )
        packed = any(group.dense_bytes for group in self.facts.groups)
        return simulated(work, rates, runs_by_chunks=not packed)


def _smallest_batch(options: Sequence[Option]) -> Option:
    """Return the option with the fewest rows that loses almost nothing of the best throughput.

    With frozen weights, the smallest batch whose computation takes twice as long as its copies is
    enough, unless it is much slower: adapters are mostly trained on little data, in few steps.
    """
    best = max(one.tokens_per_s for one in options)
    enough = []
    for one in options:
        hidden = trains_adapters(one.dealt.facts) and one.times_the_copies >= HIDDEN_TIMES
        if one.tokens_per_s >= best * (ADAPTERS_SHARE if hidden else HIDDEN_SHARE):
            enough.append(one)
    return min(enough, key=lambda one: one.layout.batch_rows)


def _layout_of(dealt: Assignment, cards: Sequence[CardLayout], request: RunRequest) -> Layout:
    """Merge the layouts of all cards into one: counts are added up, and of a setting that differs
    between cards the largest is taken."""
    layouts = [one.layout for one in cards]
    if dealt.facts.row is None:
        chunk_rows = count_or(request.chunk_rows, 0)
        layouts = [replace(layout, chunk_rows=chunk_rows) for layout in layouts]
    if len(cards) == 1:
        return exact_layout(cards[0].facts, layouts[0])
    rows = [row for one in cards for row in table_of(one.facts, one.layout)]
    away = [layout for layout in layouts if layout.offloads_activations]
    return replace(
        layouts[EDGES_CARD],
        offload=max((layout.offload for layout in layouts), key=OFFLOADS.index),
        device_groups=sum(row.weights == "device" for row in rows),
        resident_blocks=sum(row.resident and row.kind == "block" for row in rows),
        **disk_counts((group for one in cards for group in one.facts.groups), rows),
        blocks_without_recompute=sum(kept_count(one.facts, one.layout) for one in cards),
        activations="host" if away else "device",
        activations_on_device=sum(layout.activations_on_device for layout in away),
        slots=max(one.slots for one in cards),
    )


def _rows(option: Option) -> tuple[GroupPlacement, ...]:
    """Return the table of all groups, in forward order."""
    of_cards = [iter(table_of(one.facts, one.layout)) for one in option.cards]
    return tuple(replace(next(of_cards[at]), card=at) for at in option.dealt.of_groups())


def _need(option: Option) -> Footprint:
    """Return the peaks of all cards, added up; bytes outside their layouts count as workspace."""
    needs = [one.need for one in option.cards]
    total = {part.name: sum(getattr(n, part.name) for n in needs) for part in fields(Footprint)}
    total["workspace_bytes"] += sum(one.beside_bytes for one in option.cards)
    return Footprint(**total)


def _card_placement(one: CardLayout) -> CardPlacement:
    return CardPlacement(
        index=one.card.index,
        name=one.card.name,
        blocks=one.facts.layers,
        longest_run=one.longest_run,
        device_bytes=one.device_bytes,
        landing_bytes=one.landing_bytes,
        budget_bytes=one.budget_bytes,
        slots=one.slots,
        shown_bytes=one.shown_bytes,
        gpu=one.card.gpu,
    )


@dataclass(frozen=True)
class _CardSearch:
    """Places each card's share of a batch and of its chunks, which `request` sets.

    Each share is planned like a model. Besides its layout, a card holds buffers for chunks that
    arrive from other cards, and one flat sum for each further block in a run of neighbouring
    blocks.
    """

    facts: ModelFacts
    host_available_bytes: int | None
    cards: tuple[CardCapacity, ...]  # those that compute
    rates: CardsRates | None  # of these cards
    request: RunRequest
    share: float = 1.0  # of each card's memory: 1 all that may be used, 0 the least that runs
    head_dealing: HeadDealing = "one_card"
    near: Option | None = None  # that was found with other rows
    disk: DiskHome | None = None
    spill: DiskHome | None = None

    @property
    def alone(self) -> Search:
        """Return the search of one card for the whole model."""
        search = self._search(self.facts, 0, self.host_available_bytes, 0, self.request)
        assert search is not None, "nothing is beside one card's layout"
        return search

    @cached_property
    def landing_bytes(self) -> int:
        """Return the bytes of the buffers on each card for arriving chunks."""
        row, batch = self.facts.row, self.request.batch_rows
        if row is None or batch is None or len(self.cards) == 1:
            return 0
        return LANDING_BUFFERS * batch * row.block_input_bytes

    def budget_bytes(self, card: int) -> int | None:
        """Return the bytes of a card's memory that may be used; None without a GPU and a budget."""
        known = (self.request.budget_bytes, self.cards[card].free_bytes)
        return min((size for size in known if size is not None), default=None)

    def placed(self, dealt: Assignment) -> tuple[CardLayout, ...]:
        """Place every card's share. Raises DoesNotFit with the card, the numbers and the cure."""
        found = [self._place(dealt, card, self.host_available_bytes) for card in self._every]
        limit = found[0].search.limits.host_bytes
        if limit is None or sum(one.need.host_bytes for one in found) <= limit:
            return tuple(found)
        return self._within_host(dealt, found, limit)

    @property
    def _every(self) -> range:
        return range(len(self.cards))

    def _within_host(
        self, dealt: Assignment, wanted: Sequence[CardLayout], limit: int
    ) -> tuple[CardLayout, ...]:
        """Divide the host's memory among the cards by the size of their groups; memory that one
        card does not need goes to the others. `limit` is that of all together."""
        host = self.host_available_bytes
        assert host is not None
        sizes = [sum(g.host_bytes() for g in dealt.groups_of(card)) for card in self._every]
        try:
            found = [
                self._place(dealt, card, host * sizes[card] // max(1, sum(sizes)))
                for card in self._every
            ]
        except DoesNotFit:
            found = list(wanted)
        needed = sum(one.need.host_bytes for one in found)
        if needed > limit:
            narrow, spills = self._with_8bit_states(dealt), self._fits_with_states_on_disk(dealt)
            raise DoesNotFit(host_refusal(len(found), needed, limit, narrow, may_spill=spills))
        return tuple(found)

    def _fits_with_states_on_disk(self, dealt: Assignment) -> bool:
        """Return whether states on disk, which nobody asked for, would let it fit."""
        if self.spill is None or self.spill.unusable or self.request.disk != "auto":
            return False
        try:
            replace(self, request=replace(self.request, disk="on"), near=None).placed(dealt)
        except DoesNotFit:
            return False
        return True

    def _with_8bit_states(self, dealt: Assignment) -> int | None:
        """Return the host bytes with 8-bit optimizer states; None where these are impossible."""
        if not self.facts.has_masters or not any(g.trained for g in self.facts.groups):
            return None
        facts = self.facts.with_states("8bit")
        narrow = replace(self, facts=facts, host_available_bytes=None, near=None)
        try:
            found = narrow.placed(replace(dealt, facts=facts))
        except DoesNotFit:
            return None
        return sum(one.need.host_bytes for one in found)

    def _place(self, dealt: Assignment, card: int, host_bytes: int | None) -> CardLayout:
        """Place one card's share; a share that differs from another one's only in names takes its
        layout."""
        run, facts = longest_run(dealt, card), self._share(dealt, card)
        rates = None if self.rates is None else self.rates.cards[card]
        alike = (
            *(card == EDGES_CARD, run, host_bytes, self.budget_bytes(card), rates),
            tuple(id(group.unnamed) for group in facts.groups),
        )
        found = self._known.get(alike)
        if found is None:
            found = self._known[alike] = self._placed_anew(dealt, card, host_bytes, run)
        search = replace(found.search, facts=facts)
        return replace(found, card=self.cards[card], search=search)

    @cached_property
    def _known(self) -> dict[tuple[object, ...], CardLayout]:
        return {}

    def _placed_anew(
        self, dealt: Assignment, card: int, host_bytes: int | None, run: int
    ) -> CardLayout:
        found = self._placed(dealt, card, host_bytes, run, self.request)
        if len(self.cards) > 1 and 0 < found.slots <= run:
            # each block of a run computes, and one more is copied
            deeper = replace(self.request, prefetch=run)
            found = self._placed(dealt, card, host_bytes, run, deeper)
        return found

    def _placed(
        self, dealt: Assignment, card: int, host_bytes: int | None, run: int, request: RunRequest
    ) -> CardLayout:
        facts, beside = self._share(dealt, card), self.beside_bytes(dealt, card, run)
        search = self._search(facts, card, host_bytes, beside, request)
        if search is None:
            raise DoesNotFit(self._nothing_left(card, beside))
        layout, timed = self._layout(search, card)
        if layout is None:
            raise DoesNotFit(self._refusal(search, card, beside))
        return CardLayout(
            card=self.cards[card],
            search=search,
            layout=layout,
            need=search.need(layout),
            landing_bytes=self.landing_bytes,
            beside_bytes=beside,
            longest_run=run,
            budget_bytes=self.budget_bytes(card),
            timed=timed,
            share=self.share,
        )

    def _search(
        self,
        facts: ModelFacts,
        card: int,
        host_bytes: int | None,
        beside_bytes: int,
        request: RunRequest,
    ) -> Search | None:
        """Return the search of a share in a card's remaining memory; None where none remains."""
        budget = self.budget_bytes(card)
        if budget is not None:
            budget -= int(beside_bytes / AUTO_SHARE) + (beside_bytes > 0)
            if budget <= 0:
                return None
        gpu = self.cards[card].free_bytes is not None
        if len(self.cards) > 1:
            request = replace(request, budget_gib=None if gpu or budget is None else budget / GIB)
        else:
            budget = self.cards[card].free_bytes
        capacity = Capacity(
            device_free_bytes=budget if gpu else None, host_available_bytes=host_bytes
        )
        return Search(facts, capacity, request, self.disk, self.spill)

    def _layout(self, search: Search, card: int) -> tuple[Layout | None, TimedSearch | None]:
        if self.rates is not None and search.request.offload != "max":
            timed = TimedSearch(
                search,
                self.rates.for_share(card),
                clips=not search.request.optimizer_in_backward,
                passes=search.request.passes,
                near=self._near(search, card),
            )
            found = timed.at(self.share)
            if found is not None:
                return search.settled(found.layout), timed
        layout = search.find()
        limit = search.limits.spare_bytes
        if layout is not None and limit is not None and search.leaves_inputs_on_device(layout):
            layout = search.settled(left_on_device(search.facts, layout, limit))
        return layout, None

    def _near(self, search: Search, card: int) -> Layout | None:
        """Return the layout found for the card with other rows, if its number of blocks is the
        same."""
        if self.near is None or card >= len(self.near.cards):
            return None
        found = self.near.cards[card]
        alike = found.timed is not None and found.facts.layers == search.facts.layers
        return found.layout if alike else None

    def _refusal(self, search: Search, card: int, beside_bytes: int) -> str:
        if len(self.cards) == 1:
            return refusal(search)
        return (
            f"{self.cards[card].text}, with {search.facts.layers} of {self.facts.layers} blocks "
            f"and {bytes_text(beside_bytes)} for what passes between cards: {refusal(search)}; or "
            "give it fewer blocks with parallel.dealing, or leave it out of parallel.cards"
        )

    def _nothing_left(self, card: int, beside_bytes: int) -> str:
        return (
            f"{self.cards[card].text} needs {bytes_text(beside_bytes)} for what passes between "
            f"cards and {bytes_text(self.budget_bytes(card))} of its memory may be used: use fewer "
            "rows with train.batch_rows, or leave it out of parallel.cards"
        )

    def _share(self, dealt: Assignment, card: int) -> ModelFacts:
        return dealt.share_with_loss(card, self.request.batch_rows, self.head_dealing)

    def beside_bytes(self, dealt: Assignment, card: int, run: int) -> int:
        """Return the bytes on a card that its layout does not count: landing buffers, flat sums of
        a run, and the resident copy of the head's weight."""
        if len(self.cards) == 1:
            return 0
        sums = max((g.sum_bytes for g in dealt.groups_of(card) if g.kind == "block"), default=0)
        copied = self.head_dealing != "one_card" and card != EDGES_CARD
        head = self._head_copy_bytes if copied else 0
        at_once = min(run, LANES) - 1  # further blocks that compute at once
        return self.landing_bytes + at_once * (sums + self._chunk_bytes) + head

    @cached_property
    def _chunk_bytes(self) -> int:
        """Return the bytes of a block's activations while it computes one chunk."""
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
        """Return the most blocks that a card can hold: with all bytes (`none`), with their weights
        (`optimizer`), or with the least that computes them (`max`)."""
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
        dealt = Assignment(facts=self.facts, cards=cards)
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


def longest_run(dealt: Assignment, card: int) -> int:
    """Return the length of the longest run of neighbouring blocks on a card."""
    runs = (len(run) for run in runs_of(dealt.cards) if dealt.cards[run.start] == card)
    return max(runs, default=1)
