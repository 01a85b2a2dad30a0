"""Memory that gradients pass through: staging on the device, and a ring of buffers on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluxtrain.device.arena import device_flat
from fluxtrain.device.device import Device
from fluxtrain.device.transfer import Transfer
from fluxtrain.memory.group import Group
from fluxtrain.plan.depths import ring_depth, staging_depth

Report = Callable[[Group, Transfer, int], None]  # group, the copy, bytes
Shape = tuple[tuple[object, int], ...]


@dataclass(eq=False)
class _Ring:
    """Staging buffers of one size, used in turn."""

    buffers: list[Tensor]
    transfers: list[Transfer | None]
    read: list[Any]  # points of the computation after which no lane reads a buffer
    turn: int = 0


class GradientStaging:
    """Device memory that gradients are copied from and to, one or two buffers of each size.

    Used by the thread that runs the backward pass. Each copy is reported to `downloaded` or
    `uploaded`.
    """

    def __init__(self, device: Device, downloaded: Report, uploaded: Report) -> None:
        self._device = device
        self._downloaded, self._uploaded = downloaded, uploaded
        self._rings: dict[int, _Ring] = {}  # by size

    @property
    def device_bytes(self) -> int:
        rings = list(self._rings.values())  # other threads ask
        return sum(t.nbytes for ring in rings for t in ring.buffers)

    def free(self, size_bytes: int, depth: int = 0) -> Tensor:
        """Return the next buffer (size_bytes,) uint8 of `depth` buffers of this size (0: as many as
        rounded gradients need); the computation waits until its last transfer is done."""
        buffer, transfer = self.next(size_bytes, depth)
        if transfer is not None:
            transfer.wait_compute("gradients")
        return buffer

    def next(self, size_bytes: int, depth: int = 0) -> tuple[Tensor, Transfer | None]:
        """Return the next buffer as `free` does, and its last transfer, for the caller to wait for
        before the buffer is written."""
        ring = self._rings.setdefault(size_bytes, _Ring([], [], []))
        if len(ring.buffers) < (depth or staging_depth(size_bytes)):
            fresh = device_flat(self._device.torch_device, size_bytes)
            ring.buffers.append(self._device.for_copies(fresh))
            ring.transfers.append(None)
            ring.read.append(None)
            ring.turn = len(ring.buffers) - 1
        else:
            ring.turn = (ring.turn + 1) % len(ring.buffers)
            self._device.wait_for(ring.read[ring.turn])
        return ring.buffers[ring.turn], ring.transfers[ring.turn]

    def download(
        self, group: Group, host: Tensor, values: Tensor, size_bytes: int, depth: int = 0
    ) -> tuple[Transfer, Tensor]:
        """Copy `values` (on the device) to `host` memory of their shape, in its dtype.

        They are converted into the next buffer of size_bytes, as `free` returns it; that part of
        the buffer is returned too.
        """
        staged = cut(self.free(size_bytes, depth), host.dtype, host.numel()).view(host.shape)
        staged.copy_(values)
        transfer = self._device.download(host, staged)
        self._used_by(size_bytes, transfer)
        self._downloaded(group, transfer, staged.nbytes)
        return transfer, staged

    def read_until_now(self, size_bytes: int, staged: Tensor) -> None:
        """Note that the computation so far reads `staged`, in a buffer of size_bytes. The next to
        write to that buffer may be on another lane, which waits for this point."""
        if self._device.lanes > 1:
            ring = self._rings[size_bytes]
            for place, buffer in enumerate(ring.buffers):
                if buffer.data_ptr() == staged.data_ptr():
                    ring.read[place] = self._device.mark()

    def download_directly(self, group: Group, host: Tensor, values: Tensor) -> Transfer:
        """Copy `values` (on the device), which no code writes to any more, to `host` memory."""
        transfer = self._device.download(host, self._device.for_copies(values))
        self._downloaded(group, transfer, host.nbytes)
        return transfer

    def upload(
        self, group: Group, staged: Tensor, host: Tensor, size_bytes: int,
        follows: Sequence[Transfer],
    ) -> Transfer:  # fmt: skip
        """Copy `host` gradients to `staged`, a part of the buffer of size_bytes that was returned
        last, behind the transfers `follows` and the computation so far, which may read it."""
        transfer = self._device.upload(staged, host, None, self._device.mark(), follows)
        self._used_by(size_bytes, transfer)
        self._uploaded(group, transfer, staged.nbytes)
        return transfer

    def _used_by(self, size_bytes: int, transfer: Transfer) -> None:
        """Note the transfer of the buffer that was returned last."""
        ring = self._rings[size_bytes]
        ring.transfers[ring.turn] = transfer

    def holds(self, size_bytes: int, transfer: Transfer) -> bool:
        """True when no other transfer used the transfer's buffer since."""
        ring = self._rings.get(size_bytes)
        return ring is not None and any(one is transfer for one in ring.transfers)

    def keep_only(self, sizes: set[int]) -> None:
        """Free buffers of other sizes; transfers from them must be done."""
        self._rings = {size: ring for size, ring in self._rings.items() if size in sizes}

    def drain(self) -> None:
        """Wait for all transfers."""
        for ring in self._rings.values():
            for transfer in ring.transfers:
                if transfer is not None:
                    transfer.wait_host()


class GradientRing:
    """Host memory for gradients that are used up while the backward pass still runs.

    A group that is updated in backward needs host memory for its gradients from their download
    until its update. A few buffers of each size serve all groups, so that gradients do not take two
    bytes a parameter. Used by the thread that runs the backward pass.
    """

    def __init__(self) -> None:
        self._borrowers: dict[Shape, deque[Group]] = {}  # that hold a buffer, oldest first

    def lend(self, group: Group) -> None:
        """Give the group memory for its gradients: its own, a new buffer, or the buffer that
        another group has had for longest, after that group's update, which is waited for."""
        shape = tuple((segment.dtype, segment.elements) for segment in group.trained)
        borrowers = self._borrowers.setdefault(shape, deque())
        if group in borrowers:
            borrowers.remove(group)
        elif group.holds_gradient_memory:
            return  # from steps without updates in backward
        elif len(borrowers) < ring_depth(sum(s.size_bytes for s in group.trained)):
            group.ensure_gradient()
        else:
            oldest = borrowers.popleft()
            oldest.wait()
            group.take_gradient_memory(oldest)
        borrowers.append(group)

    def keep(self, group: Group) -> None:
        """Leave the group the buffer that it has, if any, for good."""
        for borrowers in self._borrowers.values():
            if group in borrowers:
                borrowers.remove(group)

    def give_back(self, groups: Iterable[Group]) -> None:
        """Free all buffers, between two steps. Any of `groups` may have made a buffer that was lent
        on since."""
        lent = [group for borrowers in self._borrowers.values() for group in borrowers]
        addresses = {address for group in lent for address in group.give_up_gradient_memory()}
        if addresses:
            for group in groups:
                group.drop_arenas(addresses)
        self._borrowers.clear()


def cut(buffer: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Return the first `count` elements that fit into `buffer` (bytes,)."""
    return buffer[: count * dtype.itemsize].view(dtype)
