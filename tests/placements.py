"""Placements of one card, made of a layout in the planner's counts."""

from __future__ import annotations

from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Footprint, Layout
from fluxtrain.plan.group_placement import table_of
from fluxtrain.plan.placement import CardPlacement, Placement, exact_layout


def placement_of(
    facts: ModelFacts, layout: Layout, need: Footprint, *, budget_bytes: int | None = None
) -> Placement:
    """Make the table of `layout`, on the current card."""
    held = exact_layout(facts, layout)
    card = CardPlacement(
        blocks=facts.layers,
        device_bytes=need.device_bytes,
        budget_bytes=budget_bytes,
        slots=held.slots or 0,
        shown_bytes=need.device_bytes,
    )
    return Placement(groups=table_of(facts, layout), layout=held, need=need, cards=(card,))
