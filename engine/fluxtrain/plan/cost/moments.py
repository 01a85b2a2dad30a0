"""When AdamW's moments are updated: with the weights, or deferred until all weights are. Pure.

Deferred, the next forward waits for less, and more bytes are moved in all: 36 a parameter with fp32
moments in place of 26. So it is chosen where the time model says that it makes a step clearly
shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.cost.step import Cost
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout, by_tier
from fluxtrain.units import duration_text

DEFERRED, WITH_WEIGHTS = "deferred", "with_weights"
CLEARLY = 0.99  # of the time otherwise, at most
DEFERS: dict[str, bool | None] = {"auto": None, WITH_WEIGHTS: False, DEFERRED: True}


def faster_of_both(layout: Layout, cost_of: Callable[[Layout], Cost]) -> tuple[Layout, Cost]:
    """`layout` with the moments updated at the better time, and its cost; at once where that is
    about as good."""
    at_once, later = (replace(layout, deferred_moments=deferred) for deferred in (False, True))
    found, deferred = cost_of(at_once), cost_of(later)
    return (later, deferred) if deferred.step_s < CLEARLY * found.step_s else (at_once, found)


def moments_choice(
    facts: ModelFacts,
    layout: Layout,
    cost_of: Callable[[Layout], Cost] | None,
    *,
    is_set: bool,
) -> ChoiceMade:
    """What a plan says; `cost_of` None: no time is known."""
    value = DEFERRED if layout.deferred_moments else WITH_WEIGHTS
    because = _because(facts, layout, cost_of, is_set)
    return ChoiceMade(name="train.moments", value=value, because=because)


def _because(
    facts: ModelFacts, layout: Layout, cost_of: Callable[[Layout], Cost] | None, is_set: bool
) -> str:
    if layout.optimizer_in_backward:
        return "each group is updated at once, as its gradients arrive"
    alone = _nothing_waits(facts, layout)
    if is_set or cost_of is None:
        return f"as set, without effect: {alone}" if layout.deferred_moments and alone else "as set"
    if alone:
        return alone
    now = cost_of(layout)
    other = cost_of(replace(layout, deferred_moments=not layout.deferred_moments))
    told, instead = duration_text(now.step_s), duration_text(other.step_s)
    if layout.deferred_moments:
        first, whole = duration_text(now.host_update_s), duration_text(other.host_update_s)
        return (
            f"{told} a step is predicted, and {instead} with the weights: the next forward waits "
            f"for {first} of AdamW on the host in place of {whole}"
        )
    return f"{told} a step is predicted, and {instead} deferred, which moves more bytes"


def _nothing_waits(facts: ModelFacts, layout: Layout) -> str:
    """Why no moments can come later; "" where some can."""
    on_host = by_tier(facts, layout)[1]
    if not on_host.trained:
        return "no trained weights are on the host"
    if not any(group.pass_bytes for group in on_host):
        return "fp16 masters, and moments in fewer bits than fp32, are updated with the weights"
    return ""
