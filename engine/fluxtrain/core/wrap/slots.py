"""Which card each block is on, which groups have a slot of their own there and which share, and
which blocks are recomputed or offload their inputs.

Saved tensors of a block refer to its weights, so only blocks whose weights stay on the device can
keep their activations.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.core.embedding.lookup import passes_in_parts
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.errors import BadInput
from fluxtrain.plan.depths import LANES
from fluxtrain.plan.group_placement import Activations, GroupPlacement


def slots_for(
    context: Context, card: int, rows: Sequence[GroupPlacement]
) -> tuple[list[Group], list[Group]]:
    """Find the groups that have a slot of their own on a card with these rows, one a group, and the
    blocks that share its slots."""
    copied = [
        (group, row)
        for group, row in zip(context.groups, rows, strict=True)
        if not row.is_on("device") and row.card == card
    ]
    owners = [
        group
        for group, row in copied
        if (row.resident if group.kind == "block" else not passes_in_parts(context, group))
    ]
    return owners, [g for g, row in copied if g.kind == "block" and not row.resident]


def make_slots(context: Context) -> None:
    """Give edges and resident blocks a slot each; the other blocks share slots, and packed weights
    are unpacked into one scratch."""
    rows = [group.placement for group in context.groups]
    for card in context.cards:
        mine = (group for group in context.groups if group.placement.card == card.number)
        card.window.scratch.make(max((group.dense_bytes for group in mine), default=0))
        owners, streamed = slots_for(context, card.number, rows)
        for group in owners:
            card.window.add_slot(group.weight_bytes, owner=group)
        largest = max((group.weight_bytes for group in streamed), default=0)
        for _ in range(context.plan.slots_of(card.number)):
            card.window.add_slot(largest)


def put_units_on_cards(context: Context) -> None:
    """Put every unit on the card of its groups; one without parameters follows the one before.

    Raises BadInput where a unit's groups are on several.
    """
    last = 0
    for unit in context.units:
        numbers = {group.placement.card for group in unit.groups}
        if len(numbers) > 1:
            raise BadInput(
                f"{unit.name} shares weights with units on other cards ({sorted(numbers)}): put "
                "groups that share weights on one card"
            )
        last = numbers.pop() if numbers else last
        unit.card = last if unit.group.kind == "block" else 0
    put_blocks_on_lanes(context)


def put_blocks_on_lanes(context: Context) -> None:
    """Let neighbours on one of several cards compute in different lanes, in turn, so that a chunk
    of one need not wait for all chunks of the one before. Packed weights are unpacked into one
    scratch, so that their blocks compute one by one."""
    if len(context.cards) == 1:
        return
    packed = {group.placement.card for group in context.groups if group.dense_bytes}
    before: Unit | None = None
    for unit in context.units:
        if unit.group.kind != "block":
            continue
        follows = before is not None and before.card == unit.card and unit.card not in packed
        unit.lane = (before.lane + 1) % LANES if before is not None and follows else 0
        unit.group.lane = unit.lane
        before = unit


def choose_recompute(context: Context) -> None:
    """Set every unit's recomputation and offload from its group's placement, between two steps. A
    unit without parameters follows the last unit before it."""
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
