"""Device memory that packed weights are unpacked into while their block computes."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.device.arena import device_flat
from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group
from fluxtrain.units import bytes_text


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
        """Bytes held."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def memory(self) -> Tensor | None:
        """The buffer (size_bytes,) uint8; None while no group is packed."""
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
        group.unpack(flat, self._memory)
        self._holds = holds
