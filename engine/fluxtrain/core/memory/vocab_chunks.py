"""A head's weight that is uploaded in vocabulary chunks: two of them are on the device.

While the computation uses one, the next one is copied. A second walk over the chunks goes in
reverse order, since the last two are still there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.core.device.arena import aligned, device_flat
from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member

Report = Callable[[Group, str, Transfer, int], None]  # group, cause, the copy, bytes
_PLACES = 2


@dataclass(eq=False)
class _Place:
    """Device memory for one chunk at a time."""

    flat: Tensor  # (bytes,) uint8
    index: int = -1  # of the chunk that is there, or on its way
    version: int = -1  # of the group's weights
    transfers: tuple[Transfer, ...] = ()
    used: bool = False  # a computation uses it now
    awaited: bool = False  # its copy was started, and no computation has used it yet
    free: object = None  # the point after which it may be overwritten


class ChunkedWeights:
    """The vocabulary chunks of members (V, ...) of one group: a head's weight, and its bias."""

    def __init__(
        self, device: Device, group: Group, members: list[Member], rows: int, report: Report
    ) -> None:
        self.group, self.members = group, members
        self.rows = rows  # of a chunk; the last one may have fewer
        self._device = device
        self._report = report
        self._places: list[_Place] = []

    @property
    def count(self) -> int:
        every: int = self.members[0].shape[0]
        return -(-every // self.rows)

    @property
    def device_bytes(self) -> int:
        return sum(place.flat.nbytes for place in self._places)

    def span(self, index: int) -> slice:
        """Return the rows of the chunk at `index`."""
        every: int = self.members[0].shape[0]
        return slice(index * self.rows, min(every, (index + 1) * self.rows))

    def prefetch(self, index: int) -> None:
        """Start to upload a chunk, if it exists, is not on the device, and a place is free."""
        if 0 <= index < self.count and self._holding(index) is None:
            free = [p for p in self._memory() if not p.used and not self._wanted(p)]
            if free:
                self._fill(free[0], index, "prefetch")

    def take(self, index: int) -> list[Tensor]:
        """Return the members' rows (n, ...) on the device; the computation waits for them. Every
        `take` is followed by one `release`."""
        place = self._holding(index)
        if place is None:
            free = [place for place in self._memory() if not place.used]
            place = min(free, key=self._wanted)
            self._fill(place, index, "demand")
        for transfer in place.transfers:
            transfer.wait_compute("weights")
        place.used, place.awaited = True, False
        return [view for view, _ in self._views(place, index)]

    def release(self, index: int) -> None:
        """Let the chunk's place be overwritten once the computation queued so far has run."""
        for place in self._places:
            if place.index == index and place.used:
                place.used = False
                place.free = self._device.mark()

    def give_back(self) -> None:
        """Wait for the copies under way and free the places."""
        self.drain()
        self._places = []

    def drain(self) -> None:
        """Wait for all copies under way; `take` raises the error of a failed one."""
        for place in self._places:
            for transfer in place.transfers:
                with contextlib.suppress(Exception):
                    transfer.wait_host()

    def _holding(self, index: int) -> _Place | None:
        for place in self._places:
            current = (place.index, place.version) == (index, self.group.version)
            if current and not any(transfer.failed() for transfer in place.transfers):
                return place
        return None

    def _wanted(self, place: _Place) -> bool:
        """Return whether the place has a prefetched chunk that no computation has used yet."""
        return place.awaited and self._holding(place.index) is place

    def _memory(self) -> list[_Place]:
        if not self._places:
            size_bytes = sum(aligned(self.rows * self._row_bytes(m)) for m in self.members)
            target = self._device.torch_device
            with torch.inference_mode(False):  # they stay for training passes that come later
                for _ in range(min(_PLACES, self.count)):
                    flat = self._device.for_copies(device_flat(target, size_bytes))
                    # its memory may have been something else's, which the computation still reads
                    self._places.append(_Place(flat, free=self._device.mark()))
        return sorted(self._places, key=lambda place: place.used)

    def _fill(self, place: _Place, index: int, cause: str) -> None:
        for before in place.transfers:
            if not before.failed() and before.instants() is None:  # it still waits for an update
                with contextlib.suppress(Exception):  # and would come after this one
                    before.wait_host()
        place.index, place.version, place.awaited = index, self.group.version, True
        transfers: list[Transfer] = []
        for view, host in self._views(place, index):
            transfer = self._device.upload(view, host, self.group.jobs.pending, place.free)
            self._report(self.group, cause, transfer, view.nbytes)
            transfers.append(transfer)
        place.transfers = tuple(transfers)

    def _views(self, place: _Place, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return each member's chunk on the device and on the host."""
        found: list[tuple[Tensor, Tensor]] = []
        start, span = 0, self.span(index)
        for member in self.members:
            host = self.group.memory.views[member.index][span]
            flat = place.flat[start : start + host.nbytes].view(host.dtype)
            found.append((flat.view(host.shape), host))
            start += aligned(self.rows * self._row_bytes(member))
        return found

    def _row_bytes(self, member: Member) -> int:
        return member.count // member.shape[0] * member.segment.dtype.itemsize
