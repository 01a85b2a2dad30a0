"""Which blocks keep their activations between forward and backward instead of computing them again.

What they save refers to their weights, so only blocks whose weights stay on the device can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxtrain.stream.block import Unit
    from fluxtrain.stream.engine import Engine


def choose_keepers(engine: Engine) -> None:
    """The first `engine.plan.kept_blocks` blocks that can; between two steps."""
    owned = {slot.owner for slot in engine.window.slots}

    def can(unit: Unit) -> bool:
        stays = all(group.home == "device" or group in owned for group in unit.groups)
        return stays and unit.group.kind == "block"

    able = [unit for unit in engine.units if can(unit)]
    keepers = able[: engine.plan.kept_blocks]
    for unit in engine.units:
        unit.keeps = unit in keepers
