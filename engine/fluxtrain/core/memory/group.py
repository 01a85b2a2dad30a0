"""`Group`: parameters that are copied, computed with and updated together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fluxtrain.core.device.spill import Spill
from fluxtrain.core.device.worker import Job
from fluxtrain.core.memory.group_layout import GroupLayout
from fluxtrain.core.memory.group_memory import GroupMemory
from fluxtrain.core.memory.homes import Homes
from fluxtrain.core.memory.packed import KeptWeights
from fluxtrain.core.memory.segment import MASTERS, Member
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.plan.group_placement import GroupPlacement, Kind, Tier
from fluxtrain.plan.states import StateFormat, StorageFormat

if TYPE_CHECKING:
    from fluxtrain.core.memory.rows import RowBuffers


class GroupJobs:
    """Jobs that run concurrently with the training and read or write a group's host memory."""

    def __init__(self) -> None:
        self.pending: Future[None] | None = None  # an update under way: its weights
        self.moments: Job | None = None  # what of an update comes after its weights
        self.storing: Future[None] | None = None  # this step's gradients, on their way to the disk
        self.saving: Future[None] | None = None  # a copy for a checkpoint, before the next update

    @property
    def busy(self) -> list[str]:
        """Return what uses the group's memory, in words."""
        jobs = {"an update": self.under_way}
        others = {"the storing of gradients": self.storing, "a checkpoint's copy": self.saving}
        jobs |= {what: job is not None and not job.done() for what, job in others.items()}
        return [what for what, is_busy in jobs.items() if is_busy]

    @property
    def before_update(self) -> list[Job]:
        """Return what the next update comes after."""
        return [job for job in (self.pending, self.moments, self.storing) if job is not None]

    @property
    def under_way(self) -> bool:
        """Return whether an update of the group or of its moments is unfinished."""
        return any(job is not None and not job.done() for job in (self.pending, self.moments))

    def wait(self) -> None:
        """Block until no update of the group nor of its moments is under way; raise the error of a
        failed one.

        From then on nothing reads or writes its weights, states and gradients on the host.
        """
        moments = self.moments
        self.wait_for_weights()
        if moments is not None:
            try:
                moments.result()
            finally:  # an interrupted wait (Ctrl-C) leaves the job to the next wait
                if self.moments is moments and moments.done():
                    self.moments = None

    def wait_for_weights(self) -> None:
        """Block until the weights are updated; moments, which touch no weights, may go on."""
        pending = self.pending
        if pending is not None:
            try:
                pending.result()
            finally:
                if self.pending is pending and pending.done():
                    self.pending = None


class Group(GroupLayout):
    """A layout with its memory, the jobs that use it, and the versions of its weights."""

    def __init__(
        self,
        name: str,
        kind: Literal["block", "edge"],
        states: StateFormat = "fp32",
        frozen: StorageFormat = "plain",
    ) -> None:
        super().__init__(name, kind, states, frozen)
        row = GroupPlacement(name=name, kind=kind)
        self.memory = GroupMemory(self, row, torch.device("cpu"), pin=False)
        self.homes = Homes(row)
        self.jobs = GroupJobs()
        self.lane = 0  # of its card's compute streams, for its unit
        self.version = 0  # counts changes of the weights
        self.frozen_version = 0  # counts changes of the frozen ones
        self.users = 0  # units that compute with this group
        self.by_rows = False  # one embedding and nothing else: norms are taken row by row
        self.rows: RowBuffers | None = None  # what its rows pass through, in place of a slot
        self._shares: Shares | None = None

    def place(
        self,
        placement: GroupPlacement,
        device: torch.device,
        *,
        pin: bool,
        spill: Spill | None = None,
        kept: KeptWeights | None = None,
        drops: bool = False,
        shares: Shares | None = None,
    ) -> None:
        """Fix the layout, and move the weights into memory where `placement` has them; see
        `GroupMemory` and its `take_weights`. spill: where states on disk go; shares: the ranges of
        other processes, which they take by `share_out`."""
        self.lay_out()
        self.homes = Homes(placement)
        self.memory = GroupMemory(self, placement, device, pin=pin, spill=spill, shares=shares)
        self.memory.take_weights(kept=kept, drops=drops)

    @property
    def shares(self) -> Shares | None:
        """Return the ranges of its tensors that this process is home to; None: it has all."""
        return None if self._shares is None or self._shares.ended else self._shares

    @property
    def is_gathered(self) -> bool:
        """Return whether uploads bring a part of the weights, and other processes send the rest."""
        return self.shares is not None and self.shares.memory is None

    def share_out(self, shares: Shares) -> None:
        """Leave the other ranges to other processes."""
        self._shares = shares
        self.memory.forget_others(shares)
        self.memory.lock_own()

    def spans(self, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes of the weights before `stop` that are at home here."""
        if self.shares is None or not self.is_gathered:
            return [(0, stop)]
        found: list[tuple[int, int]] = []
        for segment in self.segments:
            (dtype, count), at = segment.stored, segment.offset_bytes
            for start, last in self.shares.own(count) if at < stop else ():
                found.append((at + start * dtype.itemsize, at + last * dtype.itemsize))
        return found

    def gather_weights(self, flat: Tensor, stop: int) -> None:
        """Bring the ranges of all processes together in a slot's `flat` (bytes,), before `stop`."""
        shares = self._shares
        assert shares is not None, "the slot was filled with a part of the weights"
        for segment in self.segments:
            (dtype, count), at = segment.stored, segment.offset_bytes
            if at < stop:
                part = flat[at : at + count * dtype.itemsize]
                shares.gather(part.view(dtype), self.placement.card)

    @property
    def placement(self) -> GroupPlacement:
        """Return the group's row of the placement table."""
        return self.homes.row

    @placement.setter
    def placement(self, row: GroupPlacement) -> None:
        self.homes.stays(row)
        self.memory.placement = row

    def is_on(self, tier: Tier, kind: Kind = "weights") -> bool:
        """Return whether bytes of this kind live on `tier`."""
        return self.homes.row.is_on(tier, kind)

    @property
    def has_gradient(self) -> bool:
        return any(m.has_gradient for m in self.members)

    @property
    def has_state(self) -> bool:
        """Return whether the group was ever updated, so that it has moments."""
        return any(s.has_state for s in self.trained)

    def weights_changed(self, *, frozen: bool) -> None:
        """Make copies on the device stale; `frozen`: those of the frozen weights too."""
        self.version += 1
        self.frozen_version += frozen

    def forget_moments(self, member: Member) -> None:
        """Begin a member's optimizer state anew; the master stays (updates must be done)."""
        member.step = 0
        for name, view in member.states().items():
            if name not in MASTERS:
                view.zero_()


def moves(group: Group, placement: GroupPlacement) -> bool:
    """Return whether weights, states or gradients of `group` change their tier for `placement`."""
    return bool(group.homes.leaving(placement))


def prepare_move(group: Group, placement: GroupPlacement, *, pin: bool) -> Callable[[], None]:
    """Take the memory for `group` where `placement` has it; calling what is returned moves the
    group there and cannot fail.

    Its updates must be done, its gradients have arrived, and nothing compute with it. Every bit
    stays. pin: host memory that a GPU copies from. Raises DoesNotFit and IllegalMove; the group is
    as it was.
    """
    prepared = group.memory.prepare_move(placement, pin=pin)
    group.homes.refuse(placement, group.jobs.busy)

    def move() -> None:
        with group.homes.moving(placement, group.jobs.busy):
            group.memory = prepared()
        group.weights_changed(frozen=True)

    return move
