"""One way to train on some of a machine's cards, and its placement. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.cards.pipeline import PipelineTime
from fluxtrain.plan.cards.residency import Settled
from fluxtrain.plan.cards.shares import EDGES_CARD, Dealt
from fluxtrain.plan.choices.placement import CardNeed, Placement
from fluxtrain.plan.facts import OFFLOADS
from fluxtrain.plan.footprint import Footprint, Layout, kept_count
from fluxtrain.plan.group_placement import GroupPlacement, table_of
from fluxtrain.plan.heads import HeadDealing

_BINDS = {
    "compute": "the GPUs",
    "uploads": "copies of weights to the GPUs",
    "downloads": "copies of gradients to the host",
    "update": "AdamW on the host",
    "queueing": "the processor that drives the GPUs",
    "host memory": "AdamW and copies in host memory",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """Some cards with their blocks and layouts, timed where rates are known."""

    positions: tuple[int, ...]  # of the cards in the machine's list
    dealt: Dealt
    settled: tuple[Settled, ...]
    time: PipelineTime | None = None
    head_dealing: HeadDealing = "one_card"
    alone: Placement | None = None  # of one card: as it is placed without any other

    @property
    def step_s(self) -> float:
        """Predicted seconds; endless where no rates are known."""
        return float("inf") if self.time is None else self.time.step_s

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput; 0 where no rates are known."""
        return 0.0 if self.time is None else self.time.tokens_per_s

    @property
    def layout(self) -> Layout:
        """The layouts of all cards in one: counts are of all cards, what is one way or another on
        each is the most that any has."""
        layouts = [one.layout for one in self.settled]
        first = layouts[EDGES_CARD]
        kept = sum(kept_count(one.search.facts, one.layout) for one in self.settled)
        away = [layout for layout in layouts if layout.offloads_activations]
        return replace(
            first,
            offload=max((layout.offload for layout in layouts), key=OFFLOADS.index),
            device_groups=sum(row.weights == "device" for row in self.rows),
            resident_blocks=sum(row.resident and row.kind == "block" for row in self.rows),
            blocks_without_recompute=kept,
            activations="host" if away else "device",
            activations_on_device=sum(layout.activations_on_device for layout in away),
            slots=max(one.slots for one in self.settled),
        )

    @property
    def rows(self) -> tuple[GroupPlacement, ...]:
        """The table of all groups, in forward order."""
        of_cards = [iter(table_of(one.search.facts, one.layout)) for one in self.settled]
        return tuple(replace(next(of_cards[at]), card=at) for at in self.dealt.of_groups())

    @property
    def need(self) -> Footprint:
        """The peaks of all cards, added up; what is beside their layouts is workspace."""
        needs = [one.need for one in self.settled]
        total = {
            part.name: sum(getattr(need, part.name) for need in needs) for part in fields(Footprint)
        }
        total["workspace_bytes"] += sum(one.beside_bytes for one in self.settled)
        return Footprint(**total)

    def placement(self, choices: tuple[ChoiceMade, ...]) -> Placement:
        """The placement of several cards."""
        budgets = [one.budget_bytes for one in self.settled]
        known = [budget for budget in budgets if budget is not None]
        return Placement(
            groups=self.rows,
            layout=self.layout,
            need=self.need,
            budget_bytes=sum(known) if len(known) == len(budgets) else None,
            choices=choices,
            cards=tuple(
                CardNeed(
                    index=one.card.index,
                    name=one.card.name,
                    blocks=one.search.facts.layers,
                    longest_run=one.longest_run,
                    device_bytes=one.device_bytes,
                    landing_bytes=one.landing_bytes,
                    budget_bytes=budget,
                    slots=one.slots,
                    shown_bytes=one.shown_bytes,
                    gpu=one.card.gpu,
                )
                for one, budget in zip(self.settled, budgets, strict=True)
            ),
            head_dealing=self.head_dealing,
            step_s=None if self.time is None else self.time.step_s,
            busy_s={} if self.time is None else self.time.busy_s,
            binds="" if self.time is None else _BINDS[self.time.binds],
        )
