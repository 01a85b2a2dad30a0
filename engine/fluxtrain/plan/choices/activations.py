"""Which blocks' inputs stay on the device where the others' wait on the host. Pure arithmetic.

Those of the last blocks do, which the backward pass needs first: each spares the bus a copy each
way and the host its page-locked memory. They take what all other choices leave of a limit, so
nothing else has less for them.
"""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout, footprint, kept_count, offloading_blocks
from fluxtrain.units import bytes_text


def left_on_device(
    facts: ModelFacts,
    layout: Layout,
    limit_bytes: int,
    *,
    most: int | None = None,
    has_gpu: bool = True,
) -> Layout:
    """`layout` with the inputs of as many last blocks on the device, `most` at most, as it holds
    within `limit_bytes` of it; what stands behind the blocks leaves its input there too then."""
    none = replace(layout, activations_on_device=0)
    waiting = offloading_blocks(facts, none)
    most = waiting if most is None else min(most, waiting)
    if facts.row is None or most < 1:
        return none
    free = limit_bytes - footprint(facts, none, has_gpu=has_gpu).device_bytes
    each = max(1, layout.batch_rows * facts.row.block_input_bytes)
    for count in (most, min(most, free // each - 1)):  # few that leave take no more than all
        some = replace(none, activations_on_device=count)
        if count > 0 and footprint(facts, some, has_gpu=has_gpu).device_bytes <= limit_bytes:
            return some
    return none


def staying_words(facts: ModelFacts, layout: Layout) -> str:
    """What a plan says of them; "" where all go."""
    row, offloaded = facts.row, offloading_blocks(facts, layout)
    stay = facts.layers - kept_count(facts, layout) - offloaded
    if (
        row is None
        or not layout.offloads_activations
        or not layout.activations_on_device
        or not stay
    ):
        return ""
    stay_bytes = stay * layout.batch_rows * row.block_input_bytes
    return (
        f"inputs of the last {stay} of {stay + offloaded} blocks stay on the device, in "
        f"{bytes_text(stay_bytes)} that were left"
    )
