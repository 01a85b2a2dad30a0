"""Whether a unit keeps its activations between forward and backward, as the placement table says,
and whether its inputs wait on the host meanwhile.

What a block saves refers to its weights, so only blocks whose weights stay on the device can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxtrain.plan.group_placement import Activations
    from fluxtrain.stream.block import Unit
    from fluxtrain.stream.engine import Engine


def place_activations(engine: Engine) -> None:
    """Give every unit what its group's row says of activations; between two steps. A unit without
    parameters of its own has no row and does as the last one before it."""
    owned = {slot.owner for slot in engine.window.slots}

    def can_keep(unit: Unit) -> bool:
        stays = all(group.placement.weights == "device" or group in owned for group in unit.groups)
        return stays and unit.group.kind == "block"

    rows = {row.name: row.activations for row in engine.plan.groups}
    recomputed = [found for found in rows.values() if found != "kept"]
    last: Activations = recomputed[0] if recomputed else "inputs_on_device"
    for unit in engine.units:
        activations = rows.get(unit.group.name, last)
        unit.keeps = activations == "kept" and can_keep(unit)
        unit.parks = activations == "inputs_on_host"
        last = last if activations == "kept" else activations
