"""Another placement for an engine, told in counts as tests think of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.plan.facts import GroupFacts, HeadFacts, ModelFacts
from fluxtrain.plan.group_placement import table_of
from fluxtrain.plan.placement import Placement
from fluxtrain.train.live.apply_placement import apply_placement


def placed_anew(engine: Engine, **counts: Any) -> Placement:
    """The engine's placement with these fields of its layout, and its table made anew."""
    layout = replace(engine.plan.layout, **{"chunk_rows": engine.chunk_rows, **counts})
    rows = table_of(_facts_of(engine), layout)
    return replace(engine.plan, layout=layout, groups=rows)


def turn_to(engine: Engine, **counts: Any) -> None:
    """Apply that placement."""
    apply_placement(engine, placed_anew(engine, **counts))


def _facts_of(engine: Engine) -> ModelFacts:
    """As much of the model as a table is made of."""
    groups = tuple(
        GroupFacts(
            name=group.name,
            kind="block" if group.kind == "block" else "edge",
            weight_bytes=group.weight_bytes,
            users=group.users,
            table_rows=int("rows" in group.placement.transfers),
        )
        for group in engine.groups
    )
    heads = [g for g in engine.groups if "vocabulary_chunks" in g.placement.transfers]
    head = HeadFacts(
        group=heads[0].name, vocabulary=1, row_bytes=2, dtype_bytes=2, trained=True,
        tied=heads[0].users > 1,
    ) if heads else None  # fmt: skip
    return ModelFacts(groups=groups, head=head)
