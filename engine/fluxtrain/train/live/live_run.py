"""A running training as the planner sees it: predicted memory and time of changed rows. Pure.

All that changes and advice ask of the planner is asked here. It predicts from counts, so each
card's rows are counted into a layout of that card's part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from fluxtrain.plan.dealing import Assignment
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    footprint,
    left_on_device,
    may_be_spilled,
    saving_bytes,
    slot_count,
    spill_buffer_bytes,
)
from fluxtrain.plan.group_placement import GroupPlacement, disk_counts
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.simulation import StepTime, step_time
from fluxtrain.plan.spread import parted, spread_out
from fluxtrain.train.live.settings import LiveSettings, count_of


@dataclass(frozen=True)
class LiveRun:
    """A run whose settings may change. `placement` is its first one, or the one it had to fall
    back to when memory ran out."""

    facts: ModelFacts
    placement: Placement
    has_gpu: bool

    @property
    def cards(self) -> int:
        """Return the number of cards that compute."""
        return len(self.placement.cards)

    @property
    def batch_rows(self) -> int:
        """Return the rows of a backward pass."""
        return self.placement.batch_rows

    @property
    def streams(self) -> bool:
        """Return whether the strategy streams blocks."""
        return self.placement.offload in ("weights", "max")

    @cached_property
    def planned(self) -> LiveSettings:
        """Return the settings of `placement`."""
        slots = [self.placement.slots_of(card) for card in range(self.cards)]
        rows = self.placement.groups
        most = max(2, *slots)
        return LiveSettings(
            rows=rows,
            slots=tuple(
                count if count < streamed(rows, card) else most for card, count in enumerate(slots)
            ),
            chunk_rows=self.placement.layout.chunk_rows,
        )

    def card_at(self, index: int | None) -> int | None:
        """Return the card that torch counts as `index`; with a single card always that one."""
        if self.cards == 1:
            return 0
        indices = [card.index for card in self.placement.cards]
        return indices.index(index) if index in indices else None

    def name_of(self, card: int) -> str:
        """Return the name of a card in messages."""
        return f"card {self.placement.cards[card].index}" if self.cards > 1 else "the device"

    # -- which rows come first

    def first_on_device(self, rows: Sequence[GroupPlacement], count: int) -> list[GroupPlacement]:
        """Return the `count` rows of a card that are first to live on the device."""
        return list(parted(rows, count, self.placement.layout.device_first)[0])

    def first_resident(self, blocks: Sequence[GroupPlacement], count: int) -> list[GroupPlacement]:
        """Return the `count` of a card's host blocks that are first to be resident."""
        return spread_out(blocks, count)[0]

    # -- predictions

    def need(self, settings: LiveSettings) -> Footprint:
        """Predict the peaks of all cards together."""
        parts = [self._growth(settings, card) for card in range(self.cards)]
        return _grown(self.placement.need, parts)

    def device_bytes(self, settings: LiveSettings, card: int) -> int:
        """Predict the peak of one card."""
        growth = self._growth(settings, card)
        return self.placement.cards[card].device_bytes + _on_device(growth)

    def host_bytes(self, settings: LiveSettings) -> int:
        """Predict the host's peak; without a GPU it includes the device's."""
        return self.need(settings).host_bytes

    def inputs_with_room(self, settings: LiveSettings, card: int, most: int) -> int:
        """Return the number of last blocks, `most` at most, whose inputs can stay on a card so
        that it takes no more than was planned."""
        limit = self._planned_needs[card].device_bytes
        layout = self._layout(settings, card)
        found = left_on_device(self._share(card), layout, limit, most=most, has_gpu=self.has_gpu)
        return found.activations_on_device

    def step(self, settings: LiveSettings, rates: Rates, *, clips: bool, passes: int) -> StepTime:
        """Predict the seconds of a step on one card."""
        layout = self._layout(settings, 0)
        return step_time(self.facts, layout, rates, clips=clips or passes > 1, passes=passes)

    def states_to_disk(self, settings: LiveSettings, size_bytes: int) -> LiveSettings | None:
        """Return the settings with optimizer states of the fewest groups on disk that free so many
        bytes of the host; None where there are none left to move."""
        away = {row.name for row in settings.rows if row.is_on("disk", "state")}
        may_leave = may_be_spilled(self.facts, self._counted(settings.rows))
        freed, leaving = 0 if away else -spill_buffer_bytes(may_leave), set[str]()
        for group in may_leave:
            if freed < size_bytes and group.name not in away:
                leaving.add(group.name)
                freed += group.state_bytes
        rows = (replace(row, state="disk") if row.name in leaving else row for row in settings.rows)
        return replace(settings, rows=tuple(rows)) if freed > 0 and leaving else None

    def placement_with(self, settings: LiveSettings) -> Placement:
        """Return the placement of these settings, with its predicted peaks."""
        cards = range(self.cards)
        slots = [slot_count(self._share(card), self._layout(settings, card)) for card in cards]
        layout = replace(self._counted(settings.rows), chunk_rows=settings.chunk_rows,
                         slots=max(slots))  # fmt: skip
        placed = tuple(
            replace(
                planned,
                device_bytes=self.device_bytes(settings, card),
                shown_bytes=planned.shown_bytes + self._shown_growth(settings, card),
                slots=slots[card],
            )
            for card, planned in enumerate(self.placement.cards)
        )
        return replace(
            self.placement,
            groups=settings.rows,
            layout=layout,
            need=self.need(settings),
            cards=placed,
            saving_bytes=saving_bytes(self.facts, layout) if self.has_gpu else 0,
            time=None,
        )

    def left_with(self, settings: LiveSettings) -> LiveRun:
        """Return the run as it would be if these settings had been planned."""
        return replace(self, placement=self.placement_with(settings))

    def with_batch(self, batch_rows: int, chunk_rows: int | None = None) -> LiveRun:
        """Return the run with other rows in a batch."""
        layout = self.placement.layout
        layout = replace(layout, batch_rows=batch_rows, chunk_rows=chunk_rows or layout.chunk_rows)
        changed = replace(self, placement=replace(self.placement, layout=layout, time=None))
        needs = zip(changed._planned_needs, self._planned_needs, strict=True)
        grown = [_growth(now, before) for now, before in needs]
        cards = tuple(
            replace(card, device_bytes=card.device_bytes + _on_device(more))
            for card, more in zip(self.placement.cards, grown, strict=True)
        )
        need = _grown(self.placement.need, grown)
        return replace(changed, placement=replace(changed.placement, need=need, cards=cards))

    # -- counts of rows, for the planner

    def _growth(self, settings: LiveSettings, card: int) -> dict[str, int]:
        """Return how many bytes more than planned a card's share takes."""
        return _growth(self._need_of(settings, card), self._planned_needs[card])

    def _shown_growth(self, settings: LiveSettings, card: int) -> int:
        """Return `_growth` as users see it and as it is measured."""
        now, before = self._need_of(settings, card), self._planned_needs[card]
        has_gpu = self.has_gpu
        return now.shown_device_bytes(has_gpu=has_gpu) - before.shown_device_bytes(has_gpu=has_gpu)

    def _need_of(self, settings: LiveSettings, card: int) -> Footprint:
        return footprint(self._share(card), self._layout(settings, card), has_gpu=self.has_gpu)

    @cached_property
    def _planned_needs(self) -> list[Footprint]:
        return [self._need_of(self.planned, card) for card in range(self.cards)]

    def _share(self, card: int) -> ModelFacts:
        return self._shares[card]

    @cached_property
    def _shares(self) -> list[ModelFacts]:
        placement = self.placement
        if self.cards == 1:
            return [self.facts]
        blocks = tuple(row.card for row in placement.groups if row.kind == "block")
        dealt = Assignment(facts=self.facts, cards=blocks)
        return [
            dealt.share_with_loss(card, placement.batch_rows, placement.head_dealing)
            for card in range(self.cards)
        ]

    def _layout(self, settings: LiveSettings, card: int) -> Layout:
        layout = self._counted(settings.on_card(card))
        return replace(layout, slots=settings.slots[card], chunk_rows=settings.chunk_rows)

    def _counted(self, rows: Sequence[GroupPlacement]) -> Layout:
        offloads = offloads_inputs(rows)
        staying = count_of(rows, "activations_on_device")
        return replace(
            self.placement.layout,
            device_groups=count_of(rows, "device_groups"),
            resident_blocks=count_of(rows, "resident_blocks"),
            **disk_counts(self.facts.groups, rows),
            blocks_without_recompute=count_of(rows, "blocks_without_recompute"),
            activations="host" if offloads else "device",
            activations_on_device=staying if offloads else 0,
        )


_ON_HOST = ("arena_bytes", "host_bytes")


def _growth(now: Footprint, before: Footprint) -> dict[str, int]:
    return {p.name: getattr(now, p.name) - getattr(before, p.name) for p in fields(Footprint)}


def _grown(need: Footprint, parts: Sequence[Mapping[str, int]]) -> Footprint:
    names = [part.name for part in fields(Footprint)]
    return Footprint(**{n: getattr(need, n) + sum(grown[n] for grown in parts) for n in names})


def _on_device(growth: Mapping[str, int]) -> int:
    return sum(size for name, size in growth.items() if name not in _ON_HOST)


def streamed(rows: Sequence[GroupPlacement], card: int) -> int:
    """Count the blocks of a card whose weights come through shared slots."""
    return sum(
        row.card == card and row.kind == "block" and row.weights != "device" and not row.resident
        for row in rows
    )


def offloads_inputs(rows: Sequence[GroupPlacement]) -> bool:
    """Return whether inputs of some of these rows' blocks wait on the host."""
    return any(row.activations == "inputs_on_host" for row in rows)
