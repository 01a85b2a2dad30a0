"""How much host memory a plan page-locks, and what a refusal costs. No torch, no device."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout, by_tier, rows_of_table
from fluxtrain.units import bytes_text, duration_text, rate_text

CROSSINGS = (
    1.5  # of a byte a step: weights are uploaded twice and are half of it, gradients downloaded
)


def wanted_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Weights on the host and their gradients on the way there (sums of several
    passes too), and what an embedding's rows pass through."""
    on_host = by_tier(facts, layout)[1]
    by_rows = rows_of_table(facts, layout, on_host)
    passing = by_rows.host_bytes(layout.passes) if by_rows is not None else 0
    gradients = on_host.gradient_bytes(accumulates=layout.accumulates)
    return on_host.weight_bytes + gradients + passing


def page_lock_choice(wanted: int, refused: int, per_s: Mapping[str, float | None]) -> ChoiceMade:
    """How much is locked, with the cost of what the system refuses (bytes)."""
    fast, slow = per_s.get("h2d_pinned"), per_s.get("h2d_pageable")
    if not refused:
        because = f"copies reach {rate_text(fast)} then" if fast else "copies are fastest then"
        return ChoiceMade(name="page-locked memory", value=bytes_text(wanted), because=because)
    cost = "more slowly"
    if slow and fast:
        extra_s = CROSSINGS * refused * max(0.0, 1 / slow - 1 / fast)
        cost = (
            f"at about {rate_text(slow)} instead of {rate_text(fast)}, up to "
            f"{duration_text(extra_s)} more a step"
        )
    elif slow:
        cost = f"at about {rate_text(slow)}"
    return ChoiceMade(
        name="page-locked memory",
        value=bytes_text(wanted - refused),
        because=f"the system refuses {bytes_text(refused)} more, which pass through page-locked "
        f"buffers {cost}: raise `ulimit -l`",
    )


def refused_before(wanted: int, per_s: Mapping[str, float | None]) -> int:
    """What is refused for certain: all, where the probe could copy and not lock."""
    copies = per_s.get("h2d_pageable") is not None
    return wanted if copies and "pin" in per_s and per_s["pin"] is None else 0
