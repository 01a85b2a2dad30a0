"""Placements of one card, made of a layout in the planner's counts."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.plan.facts import ModelFacts, RowFacts
from fluxtrain.plan.footprint import Footprint, Layout
from fluxtrain.plan.group_placement import disk_counts, table_of
from fluxtrain.plan.placement import CardPlacement, Placement, exact_layout
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.simulation import step_time


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


def planned_reads(placement: Placement, facts: ModelFacts, passes: int = 1) -> float:
    """Return the bytes of weights that a step is simulated to read from disk."""
    row = RowFacts(hidden=64, vocabulary=128, sequence_length=24, dtype_bytes=2, activation_bytes=1)
    counts = {**disk_counts(facts.groups, placement.groups), "disk_states": 0}
    layout = replace(placement.layout, batch_rows=2, chunk_rows=2, **counts)
    rates = Rates(
        has_gpu=True, matmul_per_s=1e12, adamw_per_s=1e9, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9,
        disk_bytes_per_s=1.0,
    )  # fmt: skip
    time = step_time(replace(facts, row=row), layout, rates, passes=passes)
    assert abs(time.busy_s["disk"] - time.parts_s["disk_read"]) < 1e-6 * time.busy_s["disk"]
    return round(time.parts_s["disk_read"])
