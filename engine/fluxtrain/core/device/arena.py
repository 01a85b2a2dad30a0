"""Host memory in exact sizes, page-locked where a GPU copies from it.

torch's pinned allocator rounds up to powers of two (up to 1.7x), so an arena is an anonymous
mapping of its own that is registered with CUDA. An arena that is not locked takes no memory before
it is written to, so it may be made long before it is filled.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from fluxtrain.core.device import page_locks
from fluxtrain.machine.fresh_memory import fresh, give_back, keep_from_forks, touch

ALIGNMENT_BYTES = 128

MapMemory = Callable[[int], mmap.mmap]  # maps as many bytes, which may be shared or a file's


def aligned(count_bytes: int) -> int:
    """Round up to the alignment that vector instructions and copies want."""
    return -(-count_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostArena:
    """One mapping of `size_bytes`, handed out as tensors that own their storage.

    By default it is private to this process and zero-filled. `maps` gives another one, such as a
    memfd that processes share: its content stays, so it must be zero where zeros are expected.

    Each tensor's storage spans just its own range: libraries that look for shared storages
    (safetensors) see separate tensors.

    A forked child can read an arena if it is not locked and made `for_forks`, as it was at the
    fork; it can read no other arena.

    Locked memory is unlocked once the copies from and to it have been made. The arena itself notes
    the copies: the garbage collector finalizes it and its users in any order.
    """

    under_way: dict[Hashable, Callable[[], None]]  # by stream or range: waits for its newest copy

    def __init__(
        self, size_bytes: int, *, pin: bool, for_forks: bool = False, maps: MapMemory = fresh
    ) -> None:
        self.size_bytes, self.under_way = size_bytes, {}
        self._is_own = maps is fresh
        self._map = maps(max(size_bytes, mmap.PAGESIZE))
        touches = pin and self._is_own and page_locks.LOCKS.may_lock(size_bytes)
        touched = touches and touch(self._map)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        locked = pin and size_bytes > 0 and page_locks.LOCKS.lock(self.address, size_bytes, self)
        self.pinned_bytes = size_bytes if locked else 0
        if self._is_own and (locked or not for_forks):
            keep_from_forks(self._map)
        if touched and not locked:
            give_back(self._map)
        self._unlock = page_locks.LOCKS.unlock  # of the locks that hold it

    def tensor(self, dtype: torch.dtype, count: int, offset_bytes: int) -> Tensor:
        """Return a flat tensor (count,) over this arena's memory, which the tensor keeps alive."""
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset_bytes)

    def forget(self) -> None:
        """Free the pages of a private arena that is not locked; it is zero again."""
        assert self._is_own and not self.pinned_bytes
        give_back(self._map)

    def __del__(self) -> None:
        if not getattr(self, "pinned_bytes", 0):
            return  # memory that is not locked is copied by threads, which hold it
        try:
            for wait in list(self.under_way.values()):
                with contextlib.suppress(Exception):  # the copy was never made
                    wait()
        finally:
            self._unlock(self.address)


def device_flat(device: torch.device, size_bytes: int) -> Tensor:
    """Allocate uninitialised device memory (size_bytes,) uint8."""
    return torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=device)


class _CudaRange:
    """Gives a range of device memory a storage of its own (CUDA array interface, version 3)."""

    def __init__(self, owner: Tensor, offset_bytes: int, size_bytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (owner.data_ptr() + offset_bytes, False),
            "version": 3,
        }


def own_storage_view(flat: Tensor, dtype: torch.dtype, count: int, offset_bytes: int) -> Tensor:
    """Return a tensor (count,) over a range of CUDA memory `flat` (uint8), with a storage of just
    that range."""
    size_bytes = count * dtype.itemsize
    return torch.as_tensor(_CudaRange(flat, offset_bytes, size_bytes), device=flat.device).view(
        dtype
    )
