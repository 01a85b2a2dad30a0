"""The placement rule: facts in, placement with reasons out. No torch, no device.

    capacity = Capacity(device_free_bytes=..., host_available_bytes=...)
    placement = place(facts, capacity, RunRequest())

The rule, in this order:

1. The budget is `budget_bytes`, or the free device memory if that is less. Automatic choices plan
   with 90 % of it (the rest is for fragmentation and libraries), explicit ones with all of it; so
   with the available host memory.
2. Batch: the largest power of two, 32 at most and no more than the data's rows (one step an epoch),
   for which some layout but `max` fits; `max` only where no batch fits otherwise.
3. Chunk: rows for about 4096 tokens, enough to keep a GPU busy; halved until some layout fits.
4. Offload: `none` if it fits, else `weights`: first as many groups as fit live on the device with
   their gradients and optimizer states (host memory bandwidth binds before PCIe does, and such
   groups use neither), then as many of the other blocks' weights stay there as still fit. `max` as
   the last resort is filled up in the same way, and what is then left with the inputs of the last
   blocks (`plan/choices/activations.py`); asked for, it takes the least of the device.
   Without a GPU `auto` means `weights` (or `max`) with no residents: the blocks stream for real.

`place_for_any_rows` is the same rule for a model whose batch nobody knows yet: what does not
depend on the batch may take half of the budget, or 90 % where no less is possible.

Nothing fits: `DoesNotFit` says what is needed, what there is and which setting would fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.events.events import CardLeftOut, CardPlan, ChoiceMade
from fluxtrain.plan.choices.activations import left_on_device
from fluxtrain.plan.choices.reasons import choices_of, refusal
from fluxtrain.plan.facts import (
    Capacity,
    ModelFacts,
    Offload,
)
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    footprint,
    kept_count,
    saving_bytes,
    slot_count,
)
from fluxtrain.plan.group_placement import Activations, GroupPlacement, table_of
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.request import RunRequest, check, count_or
from fluxtrain.plan.search import AUTO_SHARE, Search
from fluxtrain.plan.spread import DeviceFirst

__all__ = ["Capacity", "ModelFacts", "Placement", "RunRequest", "place", "place_for_any_rows",
           "placement_of"]  # fmt: skip

SMALLEST_ACTIVATION_BYTES = 1 << 20
ACTIVATION_BYTES = 1 << 30  # for a chunk, where there is no budget


@dataclass(frozen=True, kw_only=True)
class CardNeed:
    """What one of several cards is predicted to take."""

    index: int  # torch's number of it; rows of the table name cards by their place in `cards`
    name: str
    blocks: int  # that it computes
    longest_run: int  # of neighbouring blocks, each with memory for a flat sum
    device_bytes: int  # peak, with `landing_bytes`
    landing_bytes: int  # buffers for chunks that come from other cards
    budget_bytes: int | None
    slots: int  # that its streamed blocks share
    shown_bytes: int = 0  # of the peak, as `Footprint.shown_device_bytes`
    gpu: int | None = None  # nvidia-smi's number of it


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the bytes of a model go, what that is predicted to take, and why."""

    groups: tuple[GroupPlacement, ...]  # the table: a row a group, in forward order
    layout: Layout  # the same in the planner's counts: read in `plan` alone
    need: Footprint  # predicted peaks
    budget_bytes: int | None = None  # None without a GPU and without a wish
    choices: tuple[ChoiceMade, ...] = ()
    process_bytes: int = 0  # the program itself on the host, measured where a run is planned
    saving_bytes: int = 0  # weights of the device that are on the host while a file is written
    reached_bytes: int = 0  # what the process held at its fullest before this plan
    cards: tuple[CardNeed, ...] = ()  # where several compute; the other numbers are of all together
    card: int | None = None  # torch's number of the one that computes alone; None: the current one
    left_out: tuple[CardLeftOut, ...] = ()  # other cards of the machine
    head_dealing: HeadDealing = "one_card"  # who computes the loss
    step_s: float | None = None  # predicted, of several cards, as the next two
    busy_s: Mapping[str, float] = field(default_factory=dict)  # of a step, of cards the busiest
    binds: str = ""  # what is busy for the most of a step

    @property
    def offload(self) -> Offload:
        """The strategy in one word."""
        return self.layout.offload

    @property
    def slots(self) -> int:
        """Device slots that the streamed blocks share."""
        return self.layout.slots or 0

    @property
    def batch_rows(self) -> int:
        """Rows of a backward pass; 0: not known."""
        return self.layout.batch_rows

    @property
    def chunk_rows(self) -> int | None:
        """Rows computed at once in a block; None: chosen by `chunk_for` when a row is measured."""
        return self.layout.chunk_rows or None

    @property
    def deferred_moments(self) -> bool:
        """Are AdamW's moments of groups on the host updated after all weights?"""
        return self.layout.deferred_moments

    @property
    def optimizer_in_backward(self) -> bool:
        """Is each group updated as soon as its gradients are there?"""
        return self.layout.optimizer_in_backward

    @property
    def totals(self) -> PlacementTotals:
        """The table in numbers."""
        return PlacementTotals(
            device_groups=sum(row.state == "device" for row in self.groups),
            device_first=self.layout.device_first,
            resident_blocks=sum(row.resident for row in self.groups if row.kind == "block"),
            blocks_without_recompute=sum(row.activations == "kept" for row in self.groups),
        )

    @property
    def device_bytes(self) -> int:
        """Predicted peak; activations are not in it where the rows are not known."""
        return self.need.device_bytes

    @property
    def host_bytes(self) -> int:
        """Predicted peak of the whole process, as far as the program itself was measured."""
        coming = self.need.host_bytes + self.process_bytes + self.saving_bytes
        return max(coming, self.reached_bytes)

    def chunk_for(self, row_bytes: int, rows: int) -> int:
        """Rows of a chunk whose saved activations (`row_bytes` each) take half of what is left."""
        left = ACTIVATION_BYTES
        if self.budget_bytes is not None:
            left = int(self.budget_bytes * AUTO_SHARE - self.device_bytes) // 2
        return max(1, min(rows, max(left, SMALLEST_ACTIVATION_BYTES) // max(1, row_bytes)))

    def with_activations(self, activations: Activations) -> Placement:
        """The same with these activations in every row."""
        rows = (replace(row, activations=activations) for row in self.groups)
        return replace(self, groups=tuple(rows))

    def budget_of(self, card: int) -> int | None:
        """Device memory that may be used of a card."""
        return self.cards[card].budget_bytes if self.cards else self.budget_bytes

    @property
    def told_cards(self) -> tuple[CardPlan, ...]:
        """What each of several cards does, as events and answers tell it."""
        return tuple(
            CardPlan(
                number=number,
                index=card.index,
                name=card.name,
                blocks=card.blocks,
                device_bytes=card.shown_bytes,
                budget_bytes=card.budget_bytes,
                edges=any(row.kind == "edge" and row.card == number for row in self.groups),
                gpu=card.gpu,
            )
            for number, card in enumerate(self.cards)
        )

    def slots_of(self, card: int) -> int:
        """Slots that the streamed blocks of a card share."""
        return self.cards[card].slots if self.cards else self.slots

    def with_layout(self, facts: ModelFacts, layout: Layout, *, has_gpu: bool) -> Placement:
        """The same run placed as `layout` says, with its predicted peaks. On several cards only the
        chunk changes."""
        if self.cards:
            return replace(self, layout=replace(self.layout, chunk_rows=layout.chunk_rows))
        return replace(
            self,
            **_laid_out(facts, layout),
            need=footprint(facts, layout, has_gpu=has_gpu),
            saving_bytes=saving_bytes(facts, layout) if has_gpu else 0,
        )


@dataclass(frozen=True, kw_only=True)
class PlacementTotals:
    """How many rows of a table say what."""

    device_groups: int  # groups with weights, states and gradients on the device
    device_first: DeviceFirst  # which groups those are
    resident_blocks: int  # of the other blocks, those whose weights stay there too
    blocks_without_recompute: int  # blocks whose activations stay there


def placement_of(
    facts: ModelFacts,
    layout: Layout,
    need: Footprint,
    *,
    budget_bytes: int | None = None,
    choices: tuple[ChoiceMade, ...] = (),
) -> Placement:
    """Make the table of `layout`."""
    rest: dict[str, Any] = {"need": need, "budget_bytes": budget_bytes, "choices": choices}
    return Placement(**_laid_out(facts, layout), **rest)


def _laid_out(facts: ModelFacts, layout: Layout) -> dict[str, Any]:
    """The table, and the layout in the numbers that hold for this model."""
    exact = replace(
        layout,
        activations="host" if layout.offloads_activations else "device",
        blocks_without_recompute=kept_count(facts, layout),
        slots=slot_count(facts, layout),
    )
    return {"groups": table_of(facts, layout), "layout": exact}


def place(facts: ModelFacts, capacity: Capacity, request: RunRequest) -> Placement:
    """Decide for rows as `facts.row` says.

    Raises `BadInput` for request that make no sense, `DoesNotFit` when nothing fits.
    """
    assert facts.row is not None, "without a row: place_for_any_rows"
    return _placement(*_found(facts, capacity, request))


def place_for_any_rows(facts: ModelFacts, capacity: Capacity, request: RunRequest) -> Placement:
    """Decide without knowing rows; `request.chunk_rows` is handed on. Raises as `place` does."""
    assert facts.row is None, "with a row: place"
    search, layout = _found(facts, capacity, request)
    return _placement(search, replace(layout, chunk_rows=count_or(request.chunk_rows, 0)))


def _placement(search: Search, layout: Layout) -> Placement:
    return placement_of(
        search.facts,
        layout,
        search.need(layout),
        budget_bytes=search.budget_bytes,
        choices=choices_of(search, layout),
    )


def _found(facts: ModelFacts, capacity: Capacity, request: RunRequest) -> tuple[Search, Layout]:
    check(request)
    if request.batch_rows is not None and request.batch_rows < 1:
        raise BadInput(f"batch_rows is {request.batch_rows}: use at least 1, or leave it out")
    search = Search(facts, capacity, request)
    layout = search.find()
    if layout is None:
        raise DoesNotFit(refusal(search))
    limit = search.limits.spare_bytes
    if limit is not None and search.leaves_inputs_on_device(layout):
        layout = left_on_device(facts, layout, limit)
    return search, layout
