"""Device memory that gradients leave through, one or two buffers of each size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fluxtrain.device.device import Device
from fluxtrain.device.transfer import Transfer
from fluxtrain.memory.arena import device_flat
from fluxtrain.plan.depths import staging_depth


@dataclass(eq=False)
class _Ring:
    """Staging buffers of one size, used in turn."""

    buffers: list[Tensor]
    transfers: list[Transfer | None]
    turn: int = 0


class GradientStaging:
    """The buffers; used by the thread that runs the backward pass."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rings: dict[int, _Ring] = {}  # by size

    @property
    def device_bytes(self) -> int:
        rings = list(self._rings.values())  # other threads ask
        return sum(t.nbytes for ring in rings for t in ring.buffers)

    def free(self, size_bytes: int, depth: int = 0) -> Tensor:
        """The next buffer (size_bytes,) uint8 of this size, of `depth` of them (0: as many as
        rounded gradients need), once its last transfer is done."""
        buffer, transfer = self.next(size_bytes, depth)
        if transfer is not None:
            transfer.wait_compute("gradients")
        return buffer

    def next(self, size_bytes: int, depth: int = 0) -> tuple[Tensor, Transfer | None]:
        """The same, and its last transfer, which whoever uses it has to wait for."""
        ring = self._rings.setdefault(size_bytes, _Ring([], []))
        if len(ring.buffers) < (depth or staging_depth(size_bytes)):
            fresh = device_flat(self._device.torch_device, size_bytes)
            ring.buffers.append(self._device.for_copies(fresh))
            ring.transfers.append(None)
            ring.turn = len(ring.buffers) - 1
        else:
            ring.turn = (ring.turn + 1) % len(ring.buffers)
        return ring.buffers[ring.turn], ring.transfers[ring.turn]

    def leaves(self, size_bytes: int, transfer: Transfer) -> None:
        """A transfer from the buffer that was given last, or to it, was started."""
        ring = self._rings[size_bytes]
        ring.transfers[ring.turn] = transfer

    def holds(self, size_bytes: int, transfer: Transfer) -> bool:
        """Has nobody used the buffer since that transfer?"""
        ring = self._rings.get(size_bytes)
        return ring is not None and any(one is transfer for one in ring.transfers)

    def keep_only(self, sizes: set[int]) -> None:
        """Give back buffers of other sizes; what left through them has arrived."""
        self._rings = {size: ring for size, ring in self._rings.items() if size in sizes}

    def drain(self) -> None:
        """Wait for all transfers."""
        for ring in self._rings.values():
            for transfer in ring.transfers:
                if transfer is not None:
                    transfer.wait_host()
