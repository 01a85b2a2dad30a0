"""Which groups have a slot of their own on the device, and which blocks share slots."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.edges.embedding import passes_in_parts
from fluxtrain.memory.group import Group
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.runtime.context import Context


def slots_for(
    context: Context, card: int, rows: Sequence[GroupPlacement]
) -> tuple[list[Group], list[Group]]:
    """Find the groups that have a slot of their own on a card with these rows, one a group, and the
    blocks that share its slots."""
    copied = [
        (group, row)
        for group, row in zip(context.groups, rows, strict=True)
        if row.weights != "device" and row.card == card
    ]
    owners = [
        group
        for group, row in copied
        if (row.resident if group.kind == "block" else not passes_in_parts(context, group))
    ]
    return owners, [g for g, row in copied if g.kind == "block" and not row.resident]
