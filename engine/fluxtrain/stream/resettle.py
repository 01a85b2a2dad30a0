"""Another window or another chunk for an engine that trains, between two optimizer steps.

Which blocks keep their weights on the device, and how many slots the others share, decides only
when bytes are copied: the results keep their bits. Another chunk changes the order in which the
rows' gradients are summed, so results are those of a run that has that chunk, within rounding of
this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group
from fluxtrain.memory.window import Slot
from fluxtrain.plan.footprint import Footprint

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine


def resettle(
    engine: Engine, *, slots: int, resident_blocks: int, chunk_rows: int, need: Footprint
) -> None:
    """Give `engine` this window and chunk; between two steps, by the thread that drives it.

    slots: shared by the blocks that are not resident; resident_blocks: the first so many of the
    blocks that are at home on the host; need: the predicted peaks of all that, for the accounts.

    New slots are allocated before any other is given back, so that running out of device memory
    leaves everything as it was. Raises DoesNotFit then.
    """
    blocks = [g for g in engine.groups if g.home == "host" and g.kind == "block"]
    resident, streamed = blocks[:resident_blocks], blocks[resident_blocks:]
    engine.flush()  # copies under way may wait for updates
    fresh: list[Slot] = []
    try:
        gone = _owned(engine, resident, fresh) + _shared(engine, streamed, slots, fresh)
    except DoesNotFit:
        for slot in fresh:
            engine.window.remove_slot(slot)
        fresh.clear()
        _give_back(engine)
        raise
    for slot in gone:
        engine.window.remove_slot(slot)
    if gone:
        gone.clear()
        _give_back(engine)
    _measure_peak_anew(engine)
    engine.plan = replace(engine.plan, slots=slots, resident_blocks=resident_blocks, need=need)
    engine.chunk_rows = chunk_rows
    engine.copy_ahead_for_the_next_step()


def _owned(engine: Engine, resident: list[Group], fresh: list[Slot]) -> list[Slot]:
    """A slot of its own for each resident block; returns those of blocks that are no longer."""
    owned = {slot.owner: slot for slot in engine.window.slots if slot.owner is not None}
    for group in resident:
        if group not in owned:
            fresh.append(engine.window.add_slot(group.wire_bytes, owner=group))
    return [
        slot for group, slot in owned.items() if group.kind == "block" and group not in resident
    ]


def _shared(engine: Engine, streamed: list[Group], count: int, fresh: list[Slot]) -> list[Slot]:
    """`count` shared slots of the largest streamed block's size; returns those to give back."""
    size_bytes = max((group.wire_bytes for group in streamed), default=0)
    shared = [slot for slot in engine.window.slots if slot.owner is None]
    fitting = [slot for slot in shared if slot.wire.nbytes == size_bytes][:count]
    for _ in range(count - len(fitting)):
        fresh.append(engine.window.add_slot(size_bytes))
    return [slot for slot in shared if slot not in fitting]


def _measure_peak_anew(engine: Engine) -> None:
    """The allocator's peak becomes that of the new layout; the accounts keep the run's."""
    if engine.device.torch_device.type == "cuda":
        engine.memory()
        torch.cuda.reset_peak_memory_stats(engine.device.torch_device)


def _give_back(engine: Engine) -> None:
    """Freed memory returns to the driver, so that what is reserved is what is used."""
    if engine.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
