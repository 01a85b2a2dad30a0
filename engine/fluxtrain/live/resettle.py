"""Another placement or another chunk for an engine that trains, between two optimizer steps.

Where weights and states live, which blocks stay on the device and how many slots the others share
decides only what is copied when, and where the same update is computed: the results keep their
bits. Another chunk changes the order in which the rows' gradients are summed, so results are those
of a run that has that chunk, within rounding of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fluxtrain.block.recompute_policy import choose_recompute
from fluxtrain.edges.embedding import passes_in_parts
from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group
from fluxtrain.memory.moving import new_home
from fluxtrain.memory.window import Slot
from fluxtrain.optimizer.optimizer_state import renew_state
from fluxtrain.plan.footprint import Footprint
from fluxtrain.plan.spread import parted, spread_out
from fluxtrain.runtime.context import Context


def resettle(
    context: Context,
    *,
    device_groups: int,
    resident_blocks: int,
    kept_blocks: int,
    slots: int,
    chunk_rows: int,
    need: Footprint,
    boundaries_on_device: int = 0,
) -> None:
    """Give `context` this placement and chunk; between two steps, by the thread that drives it.

    device_groups: so many groups live on the device, those that `context.plan.device_first` takes
    first; resident_blocks: of so many blocks at home on the host the weights stay there too; slots:
    shared by the other blocks; kept_blocks: the first so many with weights on the device keep their
    activations; need: the predicted peaks of all that, for the counters; boundaries_on_device: the
    inputs of so many last blocks stay on the device where the others' wait on the host.

    New memory is taken before any is given back, so that running out of it leaves everything as it
    was. Raises DoesNotFit then.
    """
    _come_to_rest(context)
    device, at_home = parted(context.groups, device_groups, context.plan.device_first)
    blocks = [group for group in at_home if group.kind == "block"]
    resident, streamed = spread_out(blocks, resident_blocks)
    edges = [g for g in at_home if g.kind == "edge" and not passes_in_parts(context, g)]
    fresh: list[Slot] = []
    if any(g.home == "host" for g in device) or any(g.home == "device" for g in at_home):
        context.gradients.host.give_ring_back(
            context.groups
        )  # it lends from one host group to another
    try:
        gone = _owned(context, [*edges, *resident], fresh)
        gone += _shared(context, streamed, slots, fresh)
        moves = [new_home(g, "device", pin=False) for g in device if g.home == "host"]
        pin = context.device.pins
        moves += [new_home(g, "host", pin=pin) for g in at_home if g.home == "device"]
    except DoesNotFit:
        for slot in fresh:
            context.window.remove_slot(slot)
        fresh.clear()
        _give_back(context)
        raise
    for slot in gone:
        context.window.remove_slot(slot)
    for move in moves:
        move()
    if moves:
        renew_state(owner for owners in context.owners.values() for owner in owners.values())
    gone.clear()
    moves.clear()
    _tidy(context, at_home, kept_blocks, boundaries_on_device)
    placed = {"device_groups": device_groups, "resident_blocks": resident_blocks, "slots": slots}
    placed |= {"kept_blocks": kept_blocks, "boundaries_on_device": boundaries_on_device}
    context.plan = replace(context.plan, **placed, need=need)  # type: ignore[arg-type]
    context.chunk_rows = chunk_rows
    choose_recompute(context)
    context.ahead.begin_next_step(context.plan.slots)


def _come_to_rest(context: Context) -> None:
    """No copy is under way, to or from memory that may be given back."""
    context.flush()  # copies may wait for updates
    context.window.drain()
    for unit in context.units:
        if unit.slices is not None:
            unit.slices.drain()
    context.gradients.host.drain()


def _tidy(context: Context, at_home: Sequence[Group], kept_blocks: int, staying: int) -> None:
    """After the moves: no memory stays for what is gone, and peaks are those of the new layout."""
    for group in context.groups:
        if group.rows is not None and group.home == "device":
            group.rows.give_back()
    for unit in context.units:
        if unit.slices is not None and not unit.in_slices:
            unit.slices.give_back()
    before = context.plan
    if kept_blocks > before.kept_blocks or staying > before.boundaries_on_device:
        # fewer wait on the host from now on
        context.activation_offload.give_back()
    context.gradients.stage_only({s.size_bytes for group in at_home for s in group.trained})
    _give_back(context)
    context.counters.measure_peaks_anew()


def _owned(context: Context, keepers: list[Group], fresh: list[Slot]) -> list[Slot]:
    """A slot of its own for each keeper; returns those of groups that are none any more."""
    owned = {slot.owner: slot for slot in context.window.slots if slot.owner is not None}
    for group in keepers:
        if group not in owned:
            fresh.append(context.window.add_slot(group.wire_bytes, owner=group))
    return [slot for group, slot in owned.items() if group not in keepers]


def _shared(context: Context, streamed: list[Group], count: int, fresh: list[Slot]) -> list[Slot]:
    """`count` shared slots of the largest streamed block's size; returns those to give back."""
    size_bytes = max((group.wire_bytes for group in streamed), default=0)
    shared = [slot for slot in context.window.slots if slot.owner is None]
    fitting = [slot for slot in shared if slot.wire.nbytes == size_bytes][:count]
    for _ in range(count - len(fitting)):
        fresh.append(context.window.add_slot(size_bytes))
    return [slot for slot in shared if slot not in fitting]


def _give_back(context: Context) -> None:
    """Freed memory returns to the driver, so that what is reserved is what is used."""
    if context.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
