"""Which blocks keep their activations between forward and backward instead of computing them again,
and which of the others leave their inputs on the device where the plan has them on the host.

What a block saves refers to its weights, so only blocks whose weights stay on the device can.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxtrain.stream.block import Unit
    from fluxtrain.stream.engine import Engine


def choose_keepers(engine: Engine) -> None:
    """The first `engine.plan.kept_blocks` blocks that can; between two steps. Of the others all
    units from the `engine.plan.boundaries_on_device`-th last block on leave their inputs."""
    owned = {slot.owner for slot in engine.window.slots}

    def can(unit: Unit) -> bool:
        stays = all(group.home == "device" or group in owned for group in unit.groups)
        return stays and unit.group.kind == "block"

    able = [unit for unit in engine.units if can(unit)]
    keepers = able[: engine.plan.kept_blocks]
    for unit in engine.units:
        unit.keeps = unit in keepers
    staying = engine.plan.boundaries_on_device
    blocks = [unit for unit in engine.units if unit.group.kind == "block" and not unit.keeps]
    first = blocks[-staying:][0].position if staying and blocks else len(engine.units)
    for unit in engine.units:
        unit.stays = unit.position >= first


def leave_boundaries(engine: Engine, blocks: int) -> None:
    """The inputs of the last `blocks` blocks, and of what follows them, stay on the device where
    the plan has boundaries on the host; between two steps."""
    engine.plan = replace(engine.plan, boundaries_on_device=blocks)
    choose_keepers(engine)
