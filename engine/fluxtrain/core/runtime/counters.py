"""Counters of one engine: bytes moved and held, and a log of group moves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.device.recorder import Recorder
from fluxtrain.core.memory.group import Group
from fluxtrain.events.events import Move
from fluxtrain.plan.group_placement import KINDS, GroupPlacement, Tier

_KEPT_MOVES = 256
_HELD = ("allocated_bytes", "reserved_bytes")  # of torch's allocator
_LETTERS: dict[Tier, str] = {"device": "G", "host": "C", "disk": "N"}
_Noted = tuple[int, str, str, int, str, str, Transfer]  # step, block, what, bytes, way, cause


class _MadeAtOnce:
    """A `Transfer` between two steps, which nobody waits for."""

    duration_s = None

    def instants(self) -> None:
        return None

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False

    def wait_host(self) -> None: ...
    def wait_compute(self, cause: str) -> None: ...


_MADE = _MadeAtOnce()


@dataclass(frozen=True)
class Traffic:
    """Bytes moved since the start, by direction; of the uploads also the untrained bytes."""

    h2d_bytes: int
    d2h_bytes: int
    h2d_frozen_bytes: int = 0  # in the model's dtype
    h2d_packed_bytes: int = 0
    cards: tuple[tuple[int, int, int], ...] = ()  # up, down, from other cards; where several
    disk_read_bytes: int = 0  # of weights that live in files, and of optimizer states on disk
    disk_written_bytes: int = 0  # of those


class CardCounts:
    """Counts of one card. Written by the computing thread, read by any."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self.block_input_bytes = 0  # held from forward to backward
        self.evictable_bytes = 0  # of them, those that could leave the device
        self.evicted_bytes = 0  # block inputs that have left it in spite of the plan
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.landed_bytes = 0  # came from other cards
        self.peak_bytes = 0  # the most that was held
        self._earlier_peaks = 0, 0  # in use and reserved, before torch's peaks were reset

    def device_peaks(self) -> tuple[int, int]:
        """Return the run's peaks of bytes that tensors used on the GPU and that torch reserved."""
        now_used, now_reserved = held_by_torch(self._torch_device)
        used, reserved = self._earlier_peaks
        return max(used, now_used["peak"]), max(reserved, now_reserved["peak"])

    def measure_peaks_anew(self) -> None:
        """Reset torch's own peaks; `device_peaks` still covers the whole run."""
        if self._torch_device.type == "cuda":
            self._earlier_peaks = self.device_peaks()
            torch.cuda.reset_peak_memory_stats(self._torch_device)


def held_by_torch(device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Read the bytes (`current`, `peak`) that tensors use on the GPU, and that are reserved.

    `torch.cuda.memory_allocated` and its like each sort all numbers of the allocator for one of
    them, which would take the interpreter from the computation ten times a second.
    """
    numbers = torch.cuda.memory_stats_as_nested_dict(device)
    nothing = {"current": 0, "peak": 0}  # before the first use of the GPU
    used, reserved = (numbers.get(name, {}).get("all", nothing) for name in _HELD)
    return used, reserved


class Counters:
    """Counters of one engine. Written by the computing thread, read by any."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.cards = [CardCounts(device.torch_device) for device in devices]
        self.step = 0
        self.h2d_frozen_bytes = 0
        self.h2d_packed_bytes = 0
        self._moves: deque[_Noted] = deque(maxlen=_KEPT_MOVES)
        self._move_count = 0
        self._lock = threading.Lock()

    def uploaded(self, group: Group, cause: str, transfer: Transfer, size_bytes: int) -> None:
        """Count an upload of the group's weights that was started."""
        from_disk = group.is_on("disk") and size_bytes == group.weight_bytes
        lane, way = ("disk", "N>G") if from_disk else ("h2d", "C>G")
        self._recorder_of(group).copied(lane, "weights", group.name, transfer)
        with self._lock:
            self.cards[group.placement.card].h2d_bytes += size_bytes
            self._count_untrained(group, size_bytes)
            self._note(group, "weights", size_bytes, way, cause, transfer)

    def downloaded(self, group: Group, transfer: Transfer, size_bytes: int) -> None:
        """Count a download of gradients that was started."""
        self._recorder_of(group).copied("d2h", "gradients", group.name, transfer)
        with self._lock:
            self.cards[group.placement.card].d2h_bytes += size_bytes
            self._note(group, "gradients", size_bytes, "G>C", "gradient", transfer)

    def sum_uploaded(self, group: Group, transfer: Transfer, size_bytes: int) -> None:
        """Count an upload of gradients of an earlier backward pass, which are added to."""
        self._recorder_of(group).copied("h2d", "gradients", group.name, transfer)
        with self._lock:
            self.cards[group.placement.card].h2d_bytes += size_bytes
            self._note(group, "gradients", size_bytes, "C>G", "gradient", transfer)

    def evicted(self, group: Group, transfer: Transfer, size_bytes: int) -> None:
        """Count inputs of a block that leave the device because its memory is short."""
        with self._lock:
            self._note(group, "activations", size_bytes, "G>C", "evict", transfer)

    def rehomed(self, group: Group, before: GroupPlacement) -> None:
        """Count the bytes of a group that live on other tiers than `before`."""
        sizes = {"weights": group.weight_bytes, "state": group.state_bytes}
        sizes["gradients"] = group.gradient_bytes
        with self._lock:
            for kind in KINDS:
                old, new = before.tier_of(kind), group.placement.tier_of(kind)
                if old != new and sizes[kind]:
                    way = f"{_LETTERS[old]}>{_LETTERS[new]}"
                    self._note(group, kind, sizes[kind], way, "placement", _MADE)

    def traffic(self) -> Traffic:
        cards = tuple((one.h2d_bytes, one.d2h_bytes, one.landed_bytes) for one in self.cards)
        return Traffic(
            sum(card.h2d_bytes for card in self.cards),
            sum(card.d2h_bytes for card in self.cards),
            self.h2d_frozen_bytes,
            self.h2d_packed_bytes,
            cards if len(cards) > 1 else (),
            sum(device.disk_read_bytes for device in self._devices),
        )

    def take_moves(self, limit: int) -> tuple[list[Move], int]:
        """Return the latest moves that have ended (at most `limit`, oldest first), and how many
        were started since the beginning. A move under way is returned once it has ended."""
        with self._lock:
            ended: list[_Noted] = []
            under_way: list[_Noted] = []
            for noted in self._moves:
                transfer = noted[-1]
                (ended if transfer.done() or transfer.failed() else under_way).append(noted)
            self._moves = deque(under_way, maxlen=_KEPT_MOVES)
            taken, total = ended[-limit:], self._move_count
        return [
            Move(
                step=step, block=name, what=what, bytes=size, direction=way,
                duration_s=transfer.duration_s, cause=cause,
            )
            for step, name, what, size, way, cause, transfer in taken
        ], total  # fmt: skip

    def _recorder_of(self, group: Group) -> Recorder:
        return self._devices[group.placement.card].recorder

    def _count_untrained(self, group: Group, size_bytes: int) -> None:
        """Count frozen bytes of an upload: of a whole group, or of parts of a group without
        trained weights (rows of an embedding, a range of the head)."""
        if size_bytes == group.weight_bytes:
            self.h2d_packed_bytes += packed_bytes_of(group)
            self.h2d_frozen_bytes += frozen_bytes_of(group)
        elif not group.trained_bytes:
            self.h2d_frozen_bytes += size_bytes

    def _note(
        self, group: Group, what: str, size: int, way: str, cause: str, transfer: Transfer
    ) -> None:
        self._moves.append((self.step, group.name, what, size, way, cause, transfer))
        self._move_count += 1


def packed_bytes_of(group: Group) -> int:
    """Count the bytes of the group's packed weights."""
    return sum(segment.size_bytes for segment in group.packed_segments)


def frozen_bytes_of(group: Group) -> int:
    """Count the bytes of frozen weights that are not packed, with the padding."""
    return group.weight_bytes - group.trained_bytes - packed_bytes_of(group)


class HeldInputs:
    """Counts the inputs of one unit from its forward to its backward."""

    def __init__(self, counts: CardCounts) -> None:
        self._counts = counts
        self._bytes = self._evictable_bytes = self._evicted_bytes = 0

    def add(self, size_bytes: int, evictable_bytes: int, evicted_bytes: int = 0) -> None:
        """Count bytes that come to the device (below 0: leave it), that could leave it, and that
        have left it in spite of the plan."""
        self._bytes += size_bytes
        self._evictable_bytes += evictable_bytes
        self._evicted_bytes += evicted_bytes
        self._counts.block_input_bytes += size_bytes
        self._counts.evictable_bytes += evictable_bytes
        self._counts.evicted_bytes += evicted_bytes

    def leave(self) -> None:
        """Count all of them out."""
        self.add(-self._bytes, -self._evictable_bytes, -self._evicted_bytes)

    def __del__(self) -> None:
        self.leave()
