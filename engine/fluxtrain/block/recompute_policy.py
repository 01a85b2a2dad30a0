"""Choose which blocks are recomputed in the backward pass, and which offload their inputs.

Saved tensors of a block refer to its weights, so only blocks whose weights stay on the device can
keep their activations.
"""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.memory.unit import Unit
from fluxtrain.runtime.context import Context


def choose_recompute(context: Context) -> None:
    """Let the first `plan.kept_blocks` blocks that can keep their activations, between two steps.
    Where the plan has inputs on the host, those of all units from the
    `plan.boundaries_on_device`-th last block on stay on the device."""
    plan, units = context.plan, context.units
    owned = {slot.owner for slot in context.window.slots}

    def can_keep(unit: Unit) -> bool:
        stays = all(group.home == "device" or group in owned for group in unit.groups)
        return stays and unit.group.kind == "block"

    keeping = [unit for unit in units if can_keep(unit)][: plan.kept_blocks]
    for unit in units:
        unit.recomputes = unit not in keeping
    blocks = [unit for unit in units if unit.group.kind == "block" and unit.recomputes]
    staying = plan.boundaries_on_device
    first = blocks[-staying:][0].position if staying and blocks else len(units)
    for unit in units:
        unit.offloads_inputs = plan.parks and unit.recomputes and unit.position < first


def leave_boundaries(context: Context, blocks: int) -> None:
    """Keep the inputs of the last `blocks` blocks, and of what follows them, on the device where
    the plan has inputs on the host; between two steps."""
    context.plan = replace(context.plan, boundaries_on_device=blocks)
    choose_recompute(context)
