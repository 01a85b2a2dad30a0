"""Give a training engine another placement or another chunk, between two optimizer steps.

A placement decides only what is copied when, and where the same update is computed, so results keep
their bits. Another chunk changes the order in which the rows' gradients are summed: results are
then those of a run that has that chunk, within rounding of this one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fluxtrain.core.memory.group import Group, moves, prepare_move
from fluxtrain.core.memory.group_memory import refuse_tiers
from fluxtrain.core.memory.window import Slot
from fluxtrain.core.optimizer.optimizer_state import renew_state
from fluxtrain.core.runtime.card import EngineCard
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.wrap.slots import choose_recompute, slots_for
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.group_placement import check_groups, check_rows
from fluxtrain.plan.placement import Placement

_Placed = tuple[EngineCard, Slot]


def apply_placement(context: Context, placement: Placement) -> None:
    """Give `context` this placement, between two steps and in the thread that drives it.

    First groups move whose rows name other tiers than before; then blocks get the placement's
    slots, activations and chunk. New memory is allocated before any is freed: where it runs out,
    nothing changes and DoesNotFit is raised. Blocks that stop being resident leave their slots to
    streamed blocks, which needs no memory.
    """
    check_groups(placement.groups, context.groups)
    check_rows(placement.groups, cards=len(context.cards))
    with_files = {group.name for group in context.groups if group.memory.files}
    refuse_tiers(placement.groups, on_disk=with_files)
    _come_to_rest(context)
    rows = list(zip(context.groups, placement.groups, strict=True))
    moving = [(group, row) for group, row in rows if moves(group, row)]
    fresh: list[_Placed] = []
    gone: list[_Placed] = []
    left: list[_Placed] = []
    if moving:  # the ring lends from one host group to another
        for card in context.cards:
            card.gradients.host.give_ring_back(context.groups)
    try:
        for card in context.cards:
            owners, streamed = slots_for(context, card.number, placement.groups)
            freed = _owned(card, owners, fresh)
            found = _shared(card, streamed, placement.slots_of(card.number), fresh, freed)
            left += found
            gone += [one for one in freed if one not in found]
            gone += _too_many(card, streamed, placement.slots_of(card.number))
        context.spill.make_room_for(
            size for group, row in moving for size in group.memory.records_to_make(row)
        )
        prepared = [
            prepare_move(group, row, pin=context.device.pins and not row.is_on("device"))
            for group, row in moving
        ]
    except (BadInput, DoesNotFit):
        _remove(fresh)
        fresh.clear()
        _give_back(context)
        raise
    _remove(gone)
    for card, slot in left:
        card.window.share_slot(slot)
    for (group, _), move in zip(moving, prepared, strict=True):
        _move(context, group, move)
    if prepared:
        renew_state(owner for owners in context.owners.values() for owner in owners.values())
    gone.clear()
    prepared.clear()
    before, context.plan = context.plan, placement
    for group, row in rows:
        group.placement = row
    _tidy(context, fewer_wait=_waiting(placement) < _waiting(before))
    context.chunk_rows = placement.chunk_rows or context.chunk_rows
    choose_recompute(context)
    context.begin_next_step()


def _move(context: Context, group: Group, move: Callable[[], None]) -> None:
    before = group.placement
    move()
    context.counters.rehomed(group, before)


def _waiting(placement: Placement) -> int:
    """Count the groups whose inputs wait on the host."""
    return sum(row.activations == "inputs_on_host" for row in placement.groups)


def _come_to_rest(context: Context) -> None:
    """Wait until no copy is using memory that may be freed."""
    context.flush()  # copies may wait for updates
    for card in context.cards:
        card.window.drain()
    for unit in context.units:
        if unit.vocab_chunks is not None:
            unit.vocab_chunks.drain()
    for card in context.cards:
        card.gradients.host.drain()


def _tidy(context: Context, *, fewer_wait: bool) -> None:
    """Free the memory of moved groups, and measure peaks anew. `fewer_wait`: fewer groups have
    inputs on the host than before."""
    for group in context.groups:
        if group.rows is not None and group.is_on("device"):
            group.rows.give_back()
    for unit in context.units:
        if unit.vocab_chunks is not None and not unit.in_vocab_chunks:
            unit.vocab_chunks.give_back()
    for card in context.cards:
        if fewer_wait:
            card.activation_offload.give_back()
        mine = [g for g in context.groups if g.placement.card == card.number]
        sent = [g for g in mine if not g.is_on("device", "gradients")]
        card.gradients.stage_only({s.size_bytes for group in sent for s in group.trained})
    _give_back(context)
    for card in context.cards:
        card.counts.measure_peaks_anew()


def _remove(slots: list[_Placed]) -> None:
    """Free the memory of these slots."""
    for card, slot in slots:
        card.window.remove_slot(slot)


def _owned(card: EngineCard, owners: list[Group], fresh: list[_Placed]) -> list[_Placed]:
    """Give each of `owners` a slot of its own; return the slots left without an owner."""
    owned = {slot.owner: slot for slot in card.window.slots if slot.owner is not None}
    for group in owners:
        if group not in owned:
            fresh.append((card, card.window.add_slot(group.weight_bytes, owner=group)))
    return [(card, slot) for group, slot in owned.items() if group not in owners]


def _shared(
    card: EngineCard, streamed: list[Group], count: int, fresh: list[_Placed], freed: list[_Placed]
) -> list[_Placed]:
    """Make `count` shared slots of the largest streamed block's size; return the `freed` ones,
    whose owners need none now, that became shared."""
    size_bytes, fitting = _fitting(card, streamed)
    missing = max(0, count - len(fitting))
    found = [one for one in freed if one[1].flat.nbytes == size_bytes][:missing]
    for _ in range(missing - len(found)):
        fresh.append((card, card.window.add_slot(size_bytes)))
    return found


def _too_many(card: EngineCard, streamed: list[Group], count: int) -> list[_Placed]:
    """Return the shared slots of another size, and those above `count`."""
    added = [slot for slot in card.window.slots if slot.owner is None]
    _, fitting = _fitting(card, streamed)
    return [(card, slot) for slot in added if slot not in fitting[:count]]


def _fitting(card: EngineCard, streamed: list[Group]) -> tuple[int, list[Slot]]:
    """Return the bytes of the largest streamed block, and the shared slots of that size."""
    size_bytes = max((group.weight_bytes for group in streamed), default=0)
    shared = [slot for slot in card.window.slots if slot.owner is None]
    return size_bytes, [slot for slot in shared if slot.flat.nbytes == size_bytes]


def _give_back(context: Context) -> None:
    """Return freed memory to the driver, so that reserved equals used."""
    if context.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
