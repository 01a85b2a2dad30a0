"""Where the bytes of a model go, on one or several cards, what that takes, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fluxtrain.events.events import CardLeftOut, CardPlan, ChoiceMade
from fluxtrain.plan.capacity import CardCapacity
from fluxtrain.plan.dealing import Assignment
from fluxtrain.plan.facts import ModelFacts, Offload
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    kept_count,
    slot_count,
)
from fluxtrain.plan.group_placement import Activations, GroupPlacement
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.search import AUTO_SHARE, Search, TimedSearch
from fluxtrain.plan.simulation import StepTime
from fluxtrain.plan.spread import DeviceFirst

SMALLEST_ACTIVATION_BYTES = 1 << 20
ACTIVATION_BYTES = 1 << 30  # for a chunk, where there is no budget


@dataclass(frozen=True, kw_only=True)
class CardPlacement:
    """Predicted use of one of the cards."""

    index: int | None = None  # torch's number; None: the current one. Rows have places
    name: str = ""
    blocks: int  # that it computes
    longest_run: int = 1  # of neighbouring blocks, each with memory for a flat sum
    device_bytes: int  # peak, with `landing_bytes`
    landing_bytes: int = 0  # buffers for chunks that come from other cards
    budget_bytes: int | None = None  # None without a GPU and without a budget
    slots: int = 0  # that its streamed blocks share
    shown_bytes: int = 0  # of the peak, as `Footprint.shown_device_bytes`
    gpu: int | None = None  # nvidia-smi's number of it


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the bytes of a model go, the predicted memory and time, and the reasons."""

    groups: tuple[GroupPlacement, ...]  # the table: a row a group, in forward order
    layout: Layout  # the same in the planner's counts, of all cards together
    need: Footprint  # predicted peaks, of all cards together
    cards: tuple[CardPlacement, ...]  # that compute, in the order of the rows' numbers
    choices: tuple[ChoiceMade, ...] = ()
    spill_folder: str = ""  # of optimizer states on disk; "": the system's for temporary files
    process_bytes: int = 0  # the program itself on the host, measured where a run is planned
    saving_bytes: int = 0  # weights of the device that are on the host while a file is written
    reached_bytes: int = 0  # what the process held at its fullest before this plan
    left_out: tuple[CardLeftOut, ...] = ()  # other cards of the machine
    head_dealing: HeadDealing = "one_card"  # who computes the loss
    time: StepTime | None = field(default=None, compare=False)  # None: no rates are known

    @property
    def budget_bytes(self) -> int | None:
        """Return the device memory that may be used, of all cards together; None: no budget is
        known."""
        known = [card.budget_bytes for card in self.cards if card.budget_bytes is not None]
        return sum(known) if len(known) == len(self.cards) else None

    @property
    def step_s(self) -> float | None:
        """Return the predicted seconds of a step."""
        return None if self.time is None else self.time.step_s

    def on(self, cards: Sequence[CardPlacement]) -> Placement:
        """Return the placement on the GPUs of another one, with as many cards."""
        pairs = zip(self.cards, cards, strict=True)
        there = tuple(replace(one, index=other.index, gpu=other.gpu) for one, other in pairs)
        return replace(self, cards=there)

    @property
    def several_cards(self) -> bool:
        """Return whether the blocks are on more than one card."""
        return len(self.cards) > 1

    @property
    def offload(self) -> Offload:
        """Return the strategy in one word."""
        return self.layout.offload

    @property
    def slots(self) -> int:
        """Return the number of device slots that a card's streamed blocks share, of the card with
        the most."""
        return max(card.slots for card in self.cards)

    @property
    def batch_rows(self) -> int:
        """Return the rows of a backward pass; 0: not known."""
        return self.layout.batch_rows

    @property
    def chunk_rows(self) -> int | None:
        """Return the rows computed at once in a block; None: `chunk_for` chooses once a row is
        measured."""
        return self.layout.chunk_rows or None

    @property
    def deferred_moments(self) -> bool:
        """Return whether AdamW's moments of groups on the host are updated after all weights."""
        return self.layout.deferred_moments

    @property
    def optimizer_in_backward(self) -> bool:
        """Return whether each group is updated as soon as its gradients are ready."""
        return self.layout.optimizer_in_backward

    @property
    def totals(self) -> PlacementTotals:
        """Count the rows of the table by setting."""
        return PlacementTotals(
            device_groups=sum(row.state == "device" for row in self.groups),
            device_first=self.layout.device_first,
            resident_blocks=sum(row.resident for row in self.groups if row.kind == "block"),
            blocks_without_recompute=sum(row.activations == "kept" for row in self.groups),
        )

    @property
    def device_bytes(self) -> int:
        """Return the predicted peak, without activations where the rows are not known."""
        return self.need.device_bytes

    @property
    def host_bytes(self) -> int:
        """Return the predicted peak of the whole process, as far as the program itself was
        measured."""
        coming = self.need.host_bytes + self.process_bytes + self.saving_bytes
        return max(coming, self.reached_bytes)

    def chunk_for(self, row_bytes: int, rows: int) -> int:
        """Return the rows of a chunk whose saved activations (`row_bytes` each) take half of the
        free memory."""
        left = ACTIVATION_BYTES
        if self.budget_bytes is not None:
            left = int(self.budget_bytes * AUTO_SHARE - self.device_bytes) // 2
        return max(1, min(rows, max(left, SMALLEST_ACTIVATION_BYTES) // max(1, row_bytes)))

    def with_activations(self, activations: Activations) -> Placement:
        """Return the placement with these activations in every row."""
        rows = (replace(row, activations=activations) for row in self.groups)
        return replace(self, groups=tuple(rows))

    def budget_of(self, card: int) -> int | None:
        """Return the device memory that may be used of a card."""
        return self.cards[card].budget_bytes

    def slots_of(self, card: int) -> int:
        """Return the slots that the streamed blocks of a card share."""
        return self.cards[card].slots

    @property
    def told_cards(self) -> tuple[CardPlan, ...]:
        """Return what each of several cards does, for events and answers; nothing for a single
        card."""
        if not self.several_cards:
            return ()
        return tuple(
            CardPlan(
                number=number,
                index=number if card.index is None else card.index,
                name=card.name,
                blocks=card.blocks,
                device_bytes=card.shown_bytes,
                budget_bytes=card.budget_bytes,
                edges=any(row.kind == "edge" and row.card == number for row in self.groups),
                gpu=card.gpu,
            )
            for number, card in enumerate(self.cards)
        )


@dataclass(frozen=True, kw_only=True)
class PlacementTotals:
    """Counts of the rows of a placement table, by setting."""

    device_groups: int  # groups with weights, states and gradients on the device
    device_first: DeviceFirst  # which groups those are
    resident_blocks: int  # of the other blocks, those whose weights stay there too
    blocks_without_recompute: int  # blocks whose activations stay there


def exact_layout(facts: ModelFacts, layout: Layout) -> Layout:
    """Return the layout with counts limited to the model's."""
    return replace(
        layout,
        activations="host" if layout.offloads_activations else "device",
        blocks_without_recompute=kept_count(facts, layout),
        slots=slot_count(facts, layout),
    )


@dataclass(frozen=True, kw_only=True)
class CardLayout:
    """One card's share of the model, and where its bytes are."""

    card: CardCapacity
    search: Search  # of the share, in the memory left after `beside_bytes`
    layout: Layout
    need: Footprint
    landing_bytes: int
    beside_bytes: int  # with `landing_bytes`, and what runs and the copy of the head take
    longest_run: int
    budget_bytes: int | None  # of the whole card; None without a GPU and a budget
    timed: TimedSearch | None = None  # that found the layout; None: the rule did
    share: float = 1.0  # of the memory above the least that runs, that it might take

    @property
    def facts(self) -> ModelFacts:
        """Return the share as a model."""
        return self.search.facts

    @property
    def device_bytes(self) -> int:
        """Return the predicted peak."""
        return self.need.device_bytes + self.beside_bytes

    @property
    def shown_bytes(self) -> int:
        """Return the peak as users see it and as it is measured: without a GPU the workspace, and
        all bytes outside the layout, are in the heap of the process."""
        if self.card.free_bytes is not None:
            return self.device_bytes
        return self.need.shown_device_bytes(has_gpu=False)

    @property
    def slots(self) -> int:
        """Return the number of slots that the card's streamed blocks share."""
        return slot_count(self.facts, self.layout)


@dataclass(frozen=True, kw_only=True)
class Option:
    """Some cards with their blocks and layouts, timed where rates are known."""

    positions: tuple[int, ...]  # of the cards in the machine's list
    dealt: Assignment
    cards: tuple[CardLayout, ...]
    layout: Layout  # of all cards together
    time: StepTime | None = None
    head_dealing: HeadDealing = "one_card"

    @property
    def step_s(self) -> float:
        """Return the predicted seconds; infinite where no rates are known."""
        return float("inf") if self.time is None else self.time.step_s

    @property
    def tokens_per_s(self) -> float:
        """Return the predicted throughput; 0 where no rates are known."""
        return 0.0 if self.time is None else self.time.tokens_per_s

    @property
    def times_the_copies(self) -> float:
        """Return the ratio of computation to uploads in seconds; infinite without uploads."""
        parts_s = {} if self.time is None else self.time.parts_s
        copies_s = sum(parts_s.get(name, 0.0) for name in ("upload_forward", "upload_backward"))
        computing_s = sum(parts_s.get(name, 0.0) for name in ("forward", "head", "backward"))
        return computing_s / copies_s if copies_s else float("inf")
