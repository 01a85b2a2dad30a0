"""Device slots that groups' weights are copied into, ahead of the computation.

Some groups have a slot to themselves (resident); the others share the rest. A slot keeps its
content until it is needed for another group, so the last blocks of the forward pass are still
there when the backward pass starts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxtrain.device.arena import device_flat
from fluxtrain.device.device import Device
from fluxtrain.device.transfer import Transfer
from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group
from fluxtrain.units import bytes_text

Report = Callable[[Group, str, Transfer], None]  # group, cause, the copy


@dataclass(eq=False)
class Slot:
    """Device memory for one group's weights at a time."""

    wire: Tensor  # (size_bytes,) uint8
    owner: Group | None = None  # set for a resident slot: nobody else may use it
    group: Group | None = None
    version: int = -1  # of the group's weights that are in (or on their way into) this slot
    transfer: Transfer | None = None
    users: int = 0  # computations that are using it now
    free: object = None  # the point after which it may be overwritten
    used_at: int = 0
    views: dict[int, list[Tensor]] = field(default_factory=dict)

    def views_of(self, group: Group) -> list[Tensor]:
        """Its members' weights in this slot, by index; made once."""
        key = id(group)
        if key not in self.views:
            with torch.inference_mode(False):  # they stay for training passes that come later
                self.views[key] = group.device_views(self.wire)
        return self.views[key]


class Window:
    """The slots, and which group is in which. Used by the thread that drives the computation."""

    def __init__(self, device: Device, report: Report) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self._where: dict[Group, Slot] = {}
        self._owners: set[Group] = set()
        self._report = report
        self._clock = 0

    @property
    def size_bytes(self) -> int:
        """Of all slots."""
        return sum(slot.wire.nbytes for slot in self.slots)

    def add_slot(self, size_bytes: int, owner: Group | None = None) -> Slot:
        """Allocate one more slot; `owner` makes it that group's own.

        Raises DoesNotFit; the slots that are there stay.
        """
        try:
            wire = self.device.for_copies(device_flat(self.device.torch_device, size_bytes))
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"a device slot of {bytes_text(size_bytes)} does not fit beside the "
                f"{bytes_text(self.size_bytes)} of slots already there: use offload='max', or "
                "close other programs on this GPU"
            ) from error
        # its memory may have been something else's, which the computation still reads
        slot = Slot(wire, owner=owner, free=self.device.mark())
        self.slots = [*self.slots, slot]  # anew: other threads read the list
        if owner is not None:
            self._owners.add(owner)
        return slot

    def remove_slot(self, slot: Slot) -> None:
        """Give the slot's memory back; a copy under way into it is waited for."""
        assert slot.users == 0, "a computation uses this slot"
        if slot.transfer is not None:
            slot.transfer.wait_host()
        if slot.group is not None and self._where.get(slot.group) is slot:
            del self._where[slot.group]
        self.slots = [other for other in self.slots if other is not slot]
        if slot.owner is not None:
            self._owners.discard(slot.owner)

    def holds(self, group: Group) -> Slot | None:
        """The slot that holds the group's current weights, arrived or on their way."""
        slot = self._where.get(group)
        if slot is None or slot.version != group.version:
            return None
        return None if slot.transfer is not None and slot.transfer.failed() else slot

    def is_shared_by(self, groups: Collection[Group]) -> bool:
        """Does one of these groups take a slot from the others? None that has its own does."""
        return any(group not in self._owners for group in groups)

    def prefetch(self, group: Group, keep: Collection[Group] = ()) -> bool:
        """Start to copy the group's weights in, if they are not there and a slot is free.

        `keep` are groups that are needed sooner: when the backward pass turns around, the least
        recently used of them is the next one.
        """
        if (
            group.placement.weights == "device"
            or (group.rows and group.by_rows)
            or self.holds(group) is not None
        ):
            return True
        slot = self._free_slot(group, keep)
        if slot is None:
            return False
        self._fill(slot, group, "prefetch")
        return True

    def take(self, group: Group) -> list[Tensor]:
        """The group's weights on the device, by member index; the computation waits for them.

        Every `take` is followed by one `release`.
        """
        slot = self.holds(group)
        if slot is None:
            slot = self._free_slot(group, steal=True)
            if slot is None:
                raise RuntimeError(f"no device slot is free for {group.name}")
            self._fill(slot, group, "demand")
        assert slot.transfer is not None
        slot.transfer.wait_compute("weights")
        slot.users += 1
        self._clock += 1
        slot.used_at = self._clock
        return slot.views_of(group)

    def release(self, group: Group) -> None:
        """Its computation is queued: once that has run, the slot may be overwritten."""
        slot = self._where[group]
        slot.users -= 1
        if slot.users == 0:
            slot.free = self.device.mark()

    def forget(self, group: Group) -> None:
        """The weights at home changed: what is on the device is stale (the version says so)."""
        group.version += 1

    def drain(self) -> None:
        """Wait for all copies under way; what made one fail is told to whoever takes its group."""
        for slot in self.slots:
            if slot.transfer is not None:
                with contextlib.suppress(Exception):
                    slot.transfer.wait_host()

    def _free_slot(
        self, group: Group, keep: Collection[Group] = (), *, steal: bool = False
    ) -> Slot | None:
        own = next((s for s in self.slots if s.owner is group), None)
        if own is not None:
            return own if own.users == 0 else None
        shared = [
            s
            for s in self.slots
            if s.owner is None
            and s.users == 0
            and s.wire.nbytes >= group.wire_bytes
            and (steal or not self._awaited(s))
            and not any(s.group is g and self.holds(g) is s for g in keep)
        ]
        return min(shared, key=lambda s: (self._awaited(s), s.used_at), default=None)

    def _awaited(self, slot: Slot) -> bool:
        """A copy that was started and not used yet must not be overwritten by another prefetch."""
        return slot.used_at < 0 and slot.group is not None and self.holds(slot.group) is slot

    def _fill(self, slot: Slot, group: Group, cause: str) -> None:
        self._let_pass(slot.transfer)
        if slot.group is not None and self._where.get(slot.group) is slot:
            del self._where[slot.group]
        slot.group, slot.version = group, group.version
        slot.used_at = -1
        self._where[group] = slot
        assert group.wire is not None
        slot.transfer = self.device.upload(
            slot.wire[: group.wire_bytes], group.wire[: group.wire_bytes], group.pending, slot.free
        )
        self._report(group, cause, slot.transfer)

    def _let_pass(self, before: Transfer | None) -> None:
        """A copy into the same slot that nobody wants any more, and that still waits for an update,
        would overwrite the next one: a device queues copies when what they wait for is done."""
        if before is None or before.failed() or before.instants() is not None:
            return
        started_s = time.perf_counter()
        with contextlib.suppress(Exception):  # told as in `drain`
            before.wait_host()
        self.device.stalls.add_host("update", time.perf_counter() - started_s)
