"""Device slots that groups' weights are copied into ahead of the computation, and a scratch.

Some groups have a slot to themselves (resident); the others share the rest. A slot keeps its
content until it is needed for another group, so the last blocks of the forward pass are still
there when the backward pass starts. Packed weights are copied as they are, and unpacked into the
scratch when their block computes. `CopiesAhead` learns the order in which units run and prefetches
the next ones.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxtrain.core.device.arena import device_flat
from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.packed import unpack_group
from fluxtrain.core.memory.unit import Unit
from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.depths import LOOKS_AHEAD
from fluxtrain.units import bytes_text

Report = Callable[[Group, str, Transfer, int], None]  # group, cause, the copy, bytes


class Scratch:
    """One buffer as large as the largest block's dense weights, used by one block at a time.

    It is filled on the compute stream, so no copy waits for it. Its address never changes: tensors
    that autograd saved of a block's weights are right again once the block is unpacked again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._holds: tuple[Group, int] | None = None  # with the version of its frozen weights

    @property
    def size_bytes(self) -> int:
        """Return the bytes held."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def memory(self) -> Tensor | None:
        """Return the buffer (size_bytes,) uint8; None while no group is packed."""
        return self._memory

    def make(self, size_bytes: int) -> None:
        """Allocate the buffer, once. Raises DoesNotFit."""
        if size_bytes <= self.size_bytes:
            return
        assert self._memory is None, "views of the scratch would point to freed memory"
        try:
            self._memory = device_flat(self._device, size_bytes)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"{bytes_text(size_bytes)} for one block's unpacked weights do not fit on the "
                "device: close other programs on this GPU"
            ) from error

    def fill(self, group: Group, flat: Tensor) -> None:
        """Unpack the group's weights from its device copy, if they are not there."""
        holds = group, group.frozen_version
        if self._memory is None or not group.dense_bytes or self._holds == holds:
            return
        self._holds = None
        unpack_group(group.segments, flat, self._memory)
        self._holds = holds


@dataclass(eq=False)
class Slot:
    """Device memory for one group's weights at a time."""

    flat: Tensor  # (size_bytes,) uint8
    owner: Group | None = None  # set for a resident slot: no other group may use it
    group: Group | None = None
    version: int = -1  # of the group's weights that are in (or on their way into) this slot
    frozen_version: int = -1  # of its frozen weights, likewise
    transfer: Transfer | None = None
    to_gather: int = 0  # bytes, of which other processes have parts
    users: int = 0  # computations that are using it now
    free: object = None  # the point after which it may be overwritten
    used_at: int = 0
    filled_at: int = 0
    views: dict[int, list[Tensor]] = field(default_factory=dict)

    def views_of(self, group: Group, scratch: Scratch) -> list[Tensor]:
        """Return the group members' weights in this slot, by index, and its packed ones' in the
        scratch; the views are made once."""
        key = id(group)
        if key not in self.views:
            with torch.inference_mode(False):  # they stay for training passes that come later
                self.views[key] = group.device_views(self.flat, scratch.memory)
        return self.views[key]


class Window:
    """The slots, and the group in each. Used by the thread that drives the computation."""

    def __init__(self, device: Device, report: Report) -> None:
        self.device = device
        self.slots: list[Slot] = []
        self.scratch = Scratch(device.torch_device)
        self._where: dict[Group, Slot] = {}
        self._owners: set[Group] = set()
        self._at_device: dict[Group, list[Tensor]] = {}  # views, of packed groups that live there
        self._report = report
        self._clock = 0
        self._fills = 0

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all slots, and of the scratch."""
        return sum(slot.flat.nbytes for slot in self.slots) + self.scratch.size_bytes

    def add_slot(self, size_bytes: int, owner: Group | None = None) -> Slot:
        """Allocate one more slot; `owner` makes it that group's own.

        Raises DoesNotFit; the slots that are there stay.
        """
        try:
            flat = self.device.for_copies(device_flat(self.device.torch_device, size_bytes))
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"a device slot of {bytes_text(size_bytes)} does not fit with the "
                f"{bytes_text(self.size_bytes)} of slots already there: use offload='max', or "
                "close other programs on this GPU"
            ) from error
        # the computation may still read an earlier tensor in this memory
        slot = Slot(flat, owner=owner, free=self.device.mark())
        self.slots = [*self.slots, slot]  # a new list: other threads read the old one
        if owner is not None:
            self._owners.add(owner)
            self._leave_shared_slot(owner)
        return slot

    def _leave_shared_slot(self, group: Group) -> None:
        """Forget that the group is in a slot, where others may overwrite it: a block that keeps its
        activations refers to its weights from its forward pass until its backward pass."""
        shared = self._where.pop(group, None)
        if shared is not None:
            shared.group, shared.version, shared.frozen_version = None, -1, -1

    def remove_slot(self, slot: Slot) -> None:
        """Free the slot's memory, after a copy under way into it."""
        assert slot.users == 0, "a computation uses this slot"
        if slot.transfer is not None:
            slot.transfer.wait_host()
        if slot.group is not None and self._where.get(slot.group) is slot:
            del self._where[slot.group]
        self.slots = [other for other in self.slots if other is not slot]
        if slot.owner is not None:
            self._owners.discard(slot.owner)

    def share_slot(self, slot: Slot) -> None:
        """Let other groups use the slot of a former owner; it keeps its content."""
        if slot.owner is not None:
            self._owners.discard(slot.owner)
            slot.owner = None

    def holds(self, group: Group) -> Slot | None:
        """Return the slot with the group's current weights, arrived or being uploaded."""
        slot = self._where.get(group)
        if slot is None or slot.version != group.version:
            return None
        return None if slot.transfer is not None and slot.transfer.failed() else slot

    def is_shared_by(self, groups: Collection[Group]) -> bool:
        """Return whether one of these groups has no slot of its own."""
        return any(group not in self._owners for group in groups)

    def prefetch(self, group: Group, keep: Collection[Group] = ()) -> bool:
        """Start to upload the group's weights, if they are not there; False if no slot is free.

        `keep` are groups that are needed sooner: at the turn from forward to backward, the least
        recently used of them is the next one.
        """
        if group.is_on("device") or (group.rows and group.by_rows) or self.holds(group) is not None:
            return True
        slot = self._free_slot(group, keep)
        if slot is None:
            return False
        self._fill(slot, group, "prefetch")
        return True

    def take(self, group: Group) -> list[Tensor]:
        """Return the group's device weights by member index; the computation waits for them.

        Every `take` is followed by one `release`.
        """
        slot = self.holds(group)
        if slot is None:
            slot = self._free_slot(group, steal=True)
            if slot is None:
                raise RuntimeError(f"no device slot is free for {group.name}")
            self._fill(slot, group, "demand")
        assert slot.transfer is not None
        slot.transfer.wait_compute("disk" if group.is_on("disk") else "weights")
        if slot.to_gather:
            group.gather_weights(slot.flat, slot.to_gather)
            slot.to_gather = 0
        self.scratch.fill(group, slot.flat)  # may run out of memory: the slot is not in use yet
        views = slot.views_of(group, self.scratch)
        slot.users += 1
        self._clock += 1
        slot.used_at = self._clock
        return views

    def unpack(self, group: Group) -> list[Tensor] | None:
        """Return the weights of a group that lives on the device, by member index, with its packed
        ones in the scratch; None for a group without packed ones."""
        if not group.dense_bytes:
            return None
        assert group.memory.flat_weights is not None
        self.scratch.fill(group, group.memory.flat_weights)
        if group not in self._at_device:
            with torch.inference_mode(False):
                views = group.device_views(group.memory.flat_weights, self.scratch.memory)
            self._at_device[group] = views
        return self._at_device[group]

    def release(self, group: Group) -> None:
        """Let the slot be overwritten once the computation queued so far has run."""
        slot = self._where[group]
        slot.users -= 1
        if slot.users == 0:
            slot.free = self.device.mark()

    def drain(self) -> None:
        """Wait for all copies under way; `take` raises the error of a failed one."""
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
            and s.flat.nbytes >= group.weight_bytes
            and (steal or not self._awaited(s))
            and not any(s.group is g and self.holds(g) is s for g in keep)
        ]
        here = self._where.get(group)
        if here in shared and self._has_frozen(here, group):
            return here  # since the backward pass: only what is trained has changed
        # of prefetched groups that nothing has used, the oldest was most likely a wrong guess
        return min(shared, key=lambda s: (self._awaited(s), s.used_at, s.filled_at), default=None)

    def _awaited(self, slot: Slot) -> bool:
        """Return whether the slot has a prefetched group that was not used yet: another prefetch
        must not overwrite it."""
        return slot.used_at < 0 and slot.group is not None and self.holds(slot.group) is slot

    @staticmethod
    def _has_frozen(slot: Slot, group: Group) -> bool:
        """Return whether the frozen weights of a group that has trained ones too are there."""
        return (
            slot.group is group
            and slot.frozen_version == group.frozen_version
            and slot.transfer is not None
            and not slot.transfer.failed()
            and 0 < group.trained_bytes < group.weight_bytes
        )

    def _fill(self, slot: Slot, group: Group, cause: str) -> None:
        """Start to upload the group's weights; the trained ones alone where the frozen ones of
        their present version are in the slot."""
        group.homes.use("weights")
        self._let_pass(slot)
        has_frozen = self._has_frozen(slot, group)
        trained = group.memory.trained_on_disk
        from_files = group.is_on("disk") and (trained or not has_frozen)
        stop = group.trained_bytes if has_frozen else group.weight_bytes
        stop = group.beside_files_bytes if from_files else stop
        if slot.group is not None and self._where.get(slot.group) is slot:
            del self._where[slot.group]
        slot.group, slot.version = group, group.version
        slot.frozen_version = group.frozen_version
        self._fills += 1
        slot.used_at, slot.filled_at = -1, self._fills
        self._where[group] = slot
        assert group.memory.flat_weights is not None
        source, follows = group.memory.flat_weights, list[Transfer]()
        slot.to_gather = stop if group.is_gathered else 0
        spans = [] if trained else group.spans(stop)
        for start, end in spans:
            transfer = self.device.upload(
                slot.flat[start:end], source[start:end], group.jobs.pending, slot.free, follows
            )
            slot.transfer, follows = transfer, [transfer]
        stop = sum(end - start for start, end in spans)
        if from_files:
            slot.transfer = self.device.upload_files(
                slot.flat,
                group.memory.sources,
                slot.free,
                follows,
                group.jobs.pending if trained else None,
            )
            stop = group.weight_bytes
        assert slot.transfer is not None
        self._report(group, cause, slot.transfer, stop)

    def _let_pass(self, slot: Slot) -> None:
        """Wait for an obsolete copy into the slot that would overwrite the next one: it still waits
        for an update, and would be queued once that is done; or it is in parts that nothing has
        used, of which those after the first are not on the queue of the next copy."""
        before = slot.transfer
        if before is None or before.failed():
            return
        if before.instants() is not None and (before.done() or not slot.to_gather):
            return
        started_s = time.perf_counter()
        with contextlib.suppress(Exception):  # `take` raises it
            before.wait_host()
        self.device.stalls.add_host("update", time.perf_counter() - started_s)


class CopiesAhead:
    """Prefetches weights in the order in which units ran last, forward and backward."""

    def __init__(self, window: Window, groups: Sequence[Group], card: int = 0) -> None:
        """Copy the groups of `card`, of all the model's `groups`."""
        self._window, self._groups, self._card = window, groups, card
        self._following: dict[tuple[str, Unit | None], Unit] = {}
        self._last: dict[str, Unit | None] = {"forward": None, "backward": None}
        self._lock = threading.RLock()

    def reach(self, direction: str, unit: Unit, slots: int) -> None:
        """Note that a unit is about to compute, after the last one, and prefetch the next units."""
        with self._lock:
            end = self._last["forward"]
            if direction == "backward" and self._last["backward"] is None and end is not None:
                # in an evaluation the next batch's first unit follows: here its copy would take
                # the slot of the weights that the backward pass needs next
                self._following.pop(("forward", end), None)
            self._following[direction, self._last[direction]] = unit
            self._last[direction] = unit
            self._copy(direction, unit, slots)

    def begin_next_step(self, slots: int) -> None:
        """Prefetch the first units of the next forward, each as soon as it is updated."""
        with self._lock:
            self._copy("forward", None, slots)

    def end_pass(self) -> None:
        """Treat the next unit as the first of its pass."""
        self._last = {"forward": None, "backward": None}

    def _copy(self, direction: str, unit: Unit | None, slots: int) -> None:
        mine = (group.placement for group in self._groups if group.placement.card == self._card)
        if all(placement.is_on("device") for placement in mine):
            return
        near = set(unit.groups) if unit is not None else set()
        seen: list[Unit] = [] if unit is None else [unit]
        wanted = max(1, slots - 1)
        while wanted and len(seen) <= LOOKS_AHEAD:
            unit = self._following.get((direction, unit))
            if unit is None or unit in seen:
                break
            seen.append(unit)
            if unit.in_vocab_chunks and unit.vocab_chunks is not None and direction == "forward":
                unit.vocab_chunks.prefetch(0)
                unit.vocab_chunks.prefetch(1)
            copied = [group for group in unit.copied if not group.is_on("device")]
            near.update(copied)
            started = [self._window.prefetch(group, near) for group in copied]
            if not all(started):
                break
            wanted -= self._window.is_shared_by(copied)
