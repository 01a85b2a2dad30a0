"""Decide how checkpoints are written: from copies while training goes on, or while it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxtrain.telemetry.events import ChoiceMade
from fluxtrain.units import bytes_text

SHARE_OF_ROOM = 0.5  # of the host memory that the plan leaves free


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How much host memory copies may take; 0: training waits while a checkpoint is written."""

    budget_bytes: int
    choice: ChoiceMade


def choose_snapshot(
    group_bytes: Sequence[int], at_once_bytes: int, room_bytes: int | None, *, own_optimizer: bool
) -> Snapshot:
    """Choose from the sizes of the groups' states and the host memory beside the plan.

    Args:
        group_bytes: what each group's shard takes.
        at_once_bytes: of these, what must be copied before training goes on.
        room_bytes: host memory that the plan leaves free; None: unknown.
        own_optimizer: the engine's AdamW, whose updates wait for copies group by group.
    """
    whole, largest = sum(group_bytes), max(group_bytes, default=0)
    if not own_optimizer:
        return _chosen(0, "blocking", "another package's optimizer updates all weights at once")
    if room_bytes is None:
        return _chosen(0, "blocking", "how much host memory is free is not known")
    budget = int(SHARE_OF_ROOM * max(0, room_bytes))
    beside = f"{bytes_text(room_bytes)} of host memory is free beside the plan"
    if budget >= whole:
        why = f"a copy of the state takes {bytes_text(whole)}, and {beside}"
        return _chosen(whole, "background", why)
    needed = max(2 * largest, at_once_bytes + largest)
    if budget >= needed:
        why = (
            f"copies of {bytes_text(budget)} at a time: the state takes {bytes_text(whole)}, and "
            f"{beside}; updates wait for what is still to be copied"
        )
        return _chosen(budget, "group by group", why)
    why = f"copies would take {bytes_text(needed)} or more, and {beside}: training waits"
    return _chosen(0, "blocking", why)


def _chosen(budget_bytes: int, value: str, because: str) -> Snapshot:
    choice = ChoiceMade(name="train.checkpoints", value=value, because=because)
    return Snapshot(budget_bytes=budget_bytes, choice=choice)
