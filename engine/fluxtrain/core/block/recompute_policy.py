"""Choose which blocks are recomputed in the backward pass, and which offload their inputs.

Saved tensors of a block refer to its weights, so only blocks whose weights stay on the device can
keep their activations.
"""

from __future__ import annotations

from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.plan.group_placement import Activations


def choose_recompute(context: Context) -> None:
    """Set every unit's recomputation and offload from its group's placement, between two steps. A
    unit without parameters of its own follows the last unit before it."""
    owned = {slot.owner for card in context.cards for slot in card.window.slots}

    def can_keep(unit: Unit) -> bool:
        stays = all(g.is_on("device") or g in owned for g in unit.groups)
        return stays and unit.group.kind == "block"

    rows = {row.name: row.activations for row in context.plan.groups}
    recomputed = [found for found in rows.values() if found != "kept"]
    last: Activations = recomputed[0] if recomputed else "inputs_on_device"
    for unit in context.units:
        activations = rows.get(unit.group.name, last)
        unit.recomputes = activations != "kept" or not can_keep(unit)
        unit.offloads_inputs = activations == "inputs_on_host"
        last = last if activations == "kept" else activations
