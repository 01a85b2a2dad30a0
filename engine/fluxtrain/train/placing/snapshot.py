"""Decide how checkpoints are written: from copies while training goes on, or while it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fluxtrain.config.schema import RunConfig
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.events import ChoiceMade
from fluxtrain.files.at_once import THREADS
from fluxtrain.plan.depths import RECORD_BYTES
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.placement import Placement
from fluxtrain.units import bytes_text

SHARE_OF_ROOM = 0.5  # of the host memory that the plan leaves free


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How much host memory copies may take; 0: training waits while a checkpoint is written."""

    budget_bytes: int
    how: str  # in the background, group by group, while training waits
    because: str

    def choice(self, every: int | str) -> ChoiceMade:
        """Return the plan's choice for checkpoints that are written every so many steps."""
        because = f"as set, written {self.how}: {self.because}"
        return ChoiceMade(name="train.checkpoint_every", value=str(every), because=because)

    def counted_in(self, answer: PlanAnswer) -> PlanAnswer:
        """Return the answer with the copies added to the host memory of its plan and of the
        others."""
        copies_bytes, replace = self.budget_bytes, msgspec.structs.replace
        plans = tuple(
            replace(one, host_bytes=one.host_bytes + copies_bytes) for one in answer.plans
        )
        return replace(answer, host_bytes=answer.host_bytes + copies_bytes, plans=plans)


def snapshot_of(
    config: RunConfig, facts: ModelFacts, placement: Placement, available_bytes: int | None
) -> Snapshot:
    """Choose for a planned run, by the host memory that its plan leaves free.

    The checkpoint after the last step needs no copies: nothing is trained meanwhile.
    """
    if config.train.checkpoint_every == "end" and config.train.final_model != "best":
        return _waiting("no step follows the only one that is saved")
    if config.is_sharded:
        return _waiting("shards are gathered from all ranks, one tensor after the other")
    at_once = {
        row.name for row in placement.groups if row.is_on("device", "state") != row.is_on("device")
    }
    sizes = {group.name: group.rounded_bytes + group.state_bytes for group in facts.groups}
    at_once_bytes = sum(size for name, size in sizes.items() if name in at_once)
    need = placement.need.host_bytes + placement.saving_bytes
    room_bytes = None if available_bytes is None else available_bytes - need
    if spilled := [row.name for row in placement.groups if row.is_on("disk", "state")]:
        pieces = THREADS * min(RECORD_BYTES, max(sizes[name] for name in spilled))
        copied = [sizes[row.name] for row in placement.groups if row.is_on("device", "state")]
        return _in_place(pieces + at_once_bytes + max(copied, default=0), room_bytes)
    return choose_snapshot(
        list(sizes.values()),
        at_once_bytes,
        room_bytes,
        own_optimizer=config.train.optimizer == "adamw",
    )


def choose_snapshot(
    group_bytes: Sequence[int], at_once_bytes: int, room_bytes: int | None, *, own_optimizer: bool
) -> Snapshot:
    """Choose from the sizes of the groups' states and the host memory that the plan leaves.

    Args:
        group_bytes: what each group's shard takes.
        at_once_bytes: of these, what must be copied before training goes on.
        room_bytes: host memory that the plan leaves free; None: unknown.
        own_optimizer: the engine's AdamW, whose updates wait for copies group by group.
    """
    whole, largest = sum(group_bytes), max(group_bytes, default=0)
    if not own_optimizer:
        return _waiting("another package's optimizer updates all weights at once")
    if room_bytes is None:
        return _waiting("how much host memory is free is not known")
    budget = int(SHARE_OF_ROOM * max(0, room_bytes))
    beside = f"{bytes_text(room_bytes)} of host memory is free beside the plan"
    if budget >= whole:
        why = f"a copy of the state takes {bytes_text(whole)}, and {beside}"
        return Snapshot(budget_bytes=whole, how="in the background", because=why)
    needed = max(2 * largest, at_once_bytes + largest)
    if budget >= needed:
        why = (
            f"copies of {bytes_text(budget)} at a time: the state takes {bytes_text(whole)}, and "
            f"{beside}; updates wait for what is still to be copied"
        )
        return Snapshot(budget_bytes=budget, how="group by group", because=why)
    why = f"copies would take {bytes_text(needed)} or more, and {beside}"
    return _waiting(why)


def _in_place(needed_bytes: int, room_bytes: int | None) -> Snapshot:
    """Choose for states on disk: groups are written from where they live, through `needed_bytes`
    of host memory."""
    if room_bytes is None or room_bytes < needed_bytes:
        beside = "an unknown part" if room_bytes is None else bytes_text(max(0, room_bytes))
        return _waiting(
            f"what is read from disk and devices for it takes {bytes_text(needed_bytes)}, and "
            f"{beside} of host memory is free beside the plan"
        )
    why = "states are on disk: each group's update waits until the group is written from there"
    return Snapshot(budget_bytes=needed_bytes, how="group by group", because=why)


def _waiting(because: str) -> Snapshot:
    return Snapshot(budget_bytes=0, how="while training waits", because=because)
