"""Boundary activations: what a block keeps between its forward and its backward pass.

They stay on the device, or wait on the host when the plan says so: sent home as soon as the block
has run, and brought back while the block after it (in forward order) is in its backward pass. The
last ones, which the backward pass needs first, are still on the device then.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxtrain.device.device import Device
from fluxtrain.device.transfer import Transfer
from fluxtrain.memory.boundary_homes import BoundaryHomes, Home

LEAVING = 2  # at most so many on their way home: the host must not run further ahead of the copies
_AHEAD = 1  # brought back before they are asked for


@dataclass(eq=False)
class Parked:
    """One tensor's bytes on the host."""

    host: Tensor
    transfer: Transfer  # of the way home
    source: Tensor | None  # kept until the copy has been made, or its memory would be reused
    version: int  # of `source`: another one is not what was sent home
    before: Callable[[], Parked | None]  # parked just before this one, while it lives
    for_copies: Callable[[Tensor], object]  # of the device
    home: Home | None  # that `host` is in, where it is page-locked
    give_back: Callable[[Home], None]
    back: Tensor | None = None  # on the device again, arrived once `returned` is
    returned: Transfer | None = field(default=None)

    @property
    def stays(self) -> Tensor | None:
        """The tensor itself, while its memory is kept and nobody has written to it."""
        source = self.source
        return source if source is not None and source._version == self.version else None

    def __del__(self) -> None:
        if self.back is not None:  # never fetched: the backward pass raised
            self.for_copies(self.back)
        if self.home is not None:
            self.home.unordered = self.returned if self.back is not None else None
            self.give_back(self.home)


class BoundaryPark:
    """Sends boundaries to the host and brings them back; one engine's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._leaving: deque[Parked] = deque()
        self._homes = BoundaryHomes()
        self._last: Callable[[], Parked | None] = lambda: None
        self.parked = 0  # tensors, so far

    def park(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> dict[int, Parked]:
        """Start to send home the tensors that need gradients; (position -> where it went).

        Waits for the oldest copy when too many are under way, or their memory would never be free
        for the blocks that are queued next.
        """
        gone: dict[int, Parked] = {}
        for i, (tensor, needed) in enumerate(zip(tensors, needs, strict=True)):
            if needed and tensor.is_contiguous():
                home, host = self._place(tensor)
                source = tensor.detach()
                transfer = self._device.download(host, source)
                self._device.recorder.copied("d2h", "activations", "", transfer)
                gone[i] = Parked(
                    host, transfer, source, source._version, self._last, self._device.for_copies,
                    home, self._homes.give_back,
                )  # fmt: skip
                self._last = weakref.ref(gone[i])
                self.parked += 1
                self._leaving.append(gone[i])
        while self._leaving and (len(self._leaving) > LEAVING or self._leaving[0].transfer.done()):
            self._leaving[0].transfer.wait_host()
            self._leaving.popleft().source = None
        return gone

    def fetch(self, parked: Parked) -> Tensor:
        """The tensor on the device again; the computation waits for it. Starts to bring back the
        one that the backward pass needs next."""
        self._bring_back(parked)
        if parked.back is not None and parked.returned is not None:
            back, transfer = parked.back, parked.returned  # which came after the way home
        else:
            assert parked.source is not None
            # the computation reuses this memory next, so it waits for the download
            back, transfer = parked.source, parked.transfer
        transfer.wait_compute("activations")
        parked.back = parked.source = None
        if parked in self._leaving:
            self._leaving.remove(parked)
        following = parked.before()
        for _ in range(_AHEAD):
            if following is None:
                break
            self._bring_back(following)
            following = following.before()
        return back

    def newest(self) -> Parked | None:
        """The one that was parked last, while its pass lives."""
        return self._last()

    def give_back(self) -> None:
        """Free the host memory that no boundary waits in now."""
        self._homes.clear()

    def _place(self, tensor: Tensor) -> tuple[Home | None, Tensor]:
        """Host memory for `tensor`."""
        if not self._device.pins or tensor.numel() == 0:
            return None, torch.empty(tensor.shape, dtype=tensor.dtype)
        home = self._homes.take(tensor.nbytes)
        return home, home.tensor_like(tensor)

    def _bring_back(self, parked: Parked) -> None:
        if parked.back is not None or parked.stays is not None:
            return
        parked.back = torch.empty_like(parked.host, device=self._device.torch_device)
        parked.returned = self._device.upload(
            parked.back, parked.host, None, self._device.mark(), follows=[parked.transfer]
        )
        self._device.recorder.copied("h2d", "activations", "", parked.returned)
