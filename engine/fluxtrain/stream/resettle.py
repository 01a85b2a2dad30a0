"""Another placement or another chunk for an engine that trains, between two optimizer steps.

Where weights and states live, which blocks stay on the device and how many slots the others share
decides only what is copied when, and where the same update is computed: the results keep their
bits. Another chunk changes the order in which the rows' gradients are summed, so results are those
of a run that has that chunk, within rounding of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group
from fluxtrain.memory.moving import moves, prepare_move
from fluxtrain.memory.window import Slot
from fluxtrain.plan.group_placement import GroupPlacement, check_groups, refuse_unused
from fluxtrain.plan.placement import Placement
from fluxtrain.stream.keepers import place_activations
from fluxtrain.stream.optimizer_state import renew_state
from fluxtrain.stream.rows import passes_in_parts

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine


def resettle(engine: Engine, placement: Placement) -> None:
    """Give `engine` this placement; between two steps, by the thread that drives it.

    Groups move whose rows say other tiers than before; then blocks get the slots, activations and
    chunk that the placement says. New memory is taken before any is given back, so that running out
    of it leaves everything as it was. Raises DoesNotFit then.
    """
    check_groups(placement.groups, engine.groups)
    refuse_unused(placement.groups)
    _come_to_rest(engine)
    moving = [
        (group, row)
        for group, row in zip(engine.groups, placement.groups, strict=True)
        if moves(group, row)
    ]
    owners, streamed = slots_for(engine, placement.groups)
    fresh: list[Slot] = []
    if moving:
        engine.gradients.give_ring_back(engine.groups)  # it lends from one host group to another
    try:
        gone = _owned(engine, owners, fresh)
        gone += _shared(engine, streamed, placement.slots, fresh)
        prepared = [
            prepare_move(group, row, pin=engine.device.pins and row.weights != "device")
            for group, row in moving
        ]
    except DoesNotFit:
        for slot in fresh:
            engine.window.remove_slot(slot)
        fresh.clear()
        _give_back(engine)
        raise
    for slot in gone:
        engine.window.remove_slot(slot)
    for move in prepared:
        move()
    if prepared:
        renew_state(owner for owners in engine.owners.values() for owner in owners.values())
    gone.clear()
    prepared.clear()
    before, engine.plan = engine.plan, placement
    for group, row in zip(engine.groups, placement.groups, strict=True):
        group.placement = row
    _tidy(engine, fewer_wait=_waiting(placement) < _waiting(before))
    engine.chunk_rows = placement.chunk_rows or engine.chunk_rows
    place_activations(engine)
    engine.copy_ahead_for_the_next_step()


def slots_for(engine: Engine, rows: Sequence[GroupPlacement]) -> tuple[list[Group], list[Group]]:
    """The groups that have a slot of their own with these rows, one a group, and the blocks that
    share slots."""
    copied = [
        (group, row)
        for group, row in zip(engine.groups, rows, strict=True)
        if row.weights != "device"
    ]
    owners = [
        group
        for group, row in copied
        if (row.resident if group.kind == "block" else not passes_in_parts(engine, group))
    ]
    return owners, [g for g, row in copied if g.kind == "block" and not row.resident]


def _waiting(placement: Placement) -> int:
    """How many groups' inputs wait on the host."""
    return sum(row.activations == "inputs_on_host" for row in placement.groups)


def _come_to_rest(engine: Engine) -> None:
    """No copy is under way, to or from memory that may be given back."""
    engine.flush()  # copies may wait for updates
    engine.window.drain()
    for unit in engine.units:
        if unit.slices is not None:
            unit.slices.drain()
    engine.gradients.drain()


def _tidy(engine: Engine, *, fewer_wait: bool) -> None:
    """After the moves: free the memory of what is gone, and measure peaks anew. `fewer_wait`: of
    inputs on the host."""
    for group in engine.groups:
        if group.rows is not None and group.placement.weights == "device":
            group.rows.give_back()
    for unit in engine.units:
        if unit.slices is not None and not unit.in_slices:
            unit.slices.give_back()
    if fewer_wait:
        engine.park.give_back()
    sent = [group for group in engine.groups if group.placement.gradients != "device"]
    engine.gradients.stage_only({s.size_bytes for group in sent for s in group.trained})
    _give_back(engine)
    engine.accounts.measure_peaks_anew()


def _owned(engine: Engine, keepers: list[Group], fresh: list[Slot]) -> list[Slot]:
    """A slot of its own for each keeper; returns those of groups that are none any more."""
    owned = {slot.owner: slot for slot in engine.window.slots if slot.owner is not None}
    for group in keepers:
        if group not in owned:
            fresh.append(engine.window.add_slot(group.wire_bytes, owner=group))
    return [slot for group, slot in owned.items() if group not in keepers]


def _shared(engine: Engine, streamed: list[Group], count: int, fresh: list[Slot]) -> list[Slot]:
    """`count` shared slots of the largest streamed block's size; returns those to give back."""
    size_bytes = max((group.wire_bytes for group in streamed), default=0)
    shared = [slot for slot in engine.window.slots if slot.owner is None]
    fitting = [slot for slot in shared if slot.wire.nbytes == size_bytes][:count]
    for _ in range(count - len(fitting)):
        fresh.append(engine.window.add_slot(size_bytes))
    return [slot for slot in shared if slot not in fitting]


def _give_back(engine: Engine) -> None:
    """Freed memory returns to the driver, so that what is reserved is what is used."""
    if engine.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
