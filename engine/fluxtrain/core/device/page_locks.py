"""Page-locks host memory, which a GPU copies from and to at full speed, while the system allows it.

Limits (RLIMIT_MEMLOCK, the driver's, half of Windows' memory on WSL2) count all locks of the
process together. After the first refusal no more locks are asked for until all were given back,
since each failed attempt takes as long as a granted one. Memory that is not locked is copied
through `Staging`.
"""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

from fluxtrain.machine.page_locking import forget_cuda_error, lock_limit_text
from fluxtrain.units import bytes_text

_LOG = logging.getLogger("fluxtrain")


class Arena(Protocol):
    """Host memory that notes the copies from and to it (`HostArena`)."""

    under_way: dict[Hashable, Callable[[], None]]


class PageLocks:
    """Locks ranges of host memory with CUDA."""

    def __init__(self) -> None:
        self.locked_bytes = 0
        self.refused_bytes = 0
        self._sizes: dict[int, int] = {}  # by address
        self._starts: list[int] = []  # addresses in order
        self._arenas: dict[int, weakref.ref[Arena]] = {}  # by address of their lock
        self._guard = threading.RLock()  # the collector may free an arena while another is locked

    @property
    def held_bytes(self) -> int:
        """Return the bytes that this process has locked, by us or by torch's own allocator, used
        or not."""
        return self.locked_bytes + self._torch_bytes()

    @property
    def may_lock(self) -> bool:
        """Return whether no lock was refused."""
        return not self.refused_bytes

    def lock(self, address: int, size_bytes: int, arena: Arena | None = None) -> bool:
        """Lock a range of memory, that of `arena`; False when the system refuses, now or before."""
        with self._guard:
            if self.may_lock and self._register(address, size_bytes):
                self._sizes[address] = size_bytes
                bisect.insort(self._starts, address)
                self.locked_bytes += size_bytes
                if arena is not None:
                    self._arenas[address] = weakref.ref(arena)
                return True
            first = self._refused(size_bytes)
        if first:  # unguarded: writing the log may wait for a thread that frees an arena
            self._tell(size_bytes)
        return False

    def unlock(self, address: int) -> None:
        """Unlock a range, if it was locked."""
        with self._guard:
            size_bytes = self._sizes.pop(address, None)
            if size_bytes is not None:
                self._starts.remove(address)
                self._arenas.pop(address, None)
                self.locked_bytes -= size_bytes
                self._unregister(address)
            if not self._sizes:
                self.refused_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialised host memory, locked if the system allows it."""
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self.may_lock:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError:
                forget_cuda_error()
                if self._refused(size_bytes):
                    self._tell(size_bytes)
        return torch.empty(shape, dtype=dtype)

    def holds(self, memory: Tensor) -> bool:
        """Return whether all of this host memory is page-locked, by us or by torch's own
        allocator. CUDA copies nothing that is locked in part, and is asked about the first byte."""
        with self._guard:
            if self._start_of(memory.data_ptr(), 1) is not None:
                return self._start_of(memory.data_ptr(), memory.nbytes) is not None
        return self._locked_by_torch(memory)

    def arena_of(self, memory: Tensor) -> Arena | None:
        """Return the arena whose locked memory this is. The caller holds it until its copy is
        queued, and notes the copy in `under_way`."""
        with self._guard:
            start = self._start_of(memory.data_ptr(), memory.nbytes)
            found = None if start is None else self._arenas.get(start)
        return None if found is None else found()

    def _start_of(self, address: int, size_bytes: int) -> int | None:
        """Return the address of the locked range that all of this memory is in, if there is one."""
        starts = self._starts[:]  # a copy: the collector may free a range meanwhile
        before = bisect.bisect_right(starts, address)
        start = starts[before - 1] if before else address
        end = start + self._sizes.get(start, 0)
        return start if start <= address < end and address + size_bytes <= end else None

    def _refused(self, size_bytes: int) -> bool:
        """Count a refusal; True when it is the first."""
        before, self.refused_bytes = self.refused_bytes, self.refused_bytes + max(1, size_bytes)
        return not before

    def _tell(self, size_bytes: int) -> None:
        _LOG.warning(
            "%s of host memory are page-locked and %s more were refused%s: what is not locked "
            "is copied through page-locked buffers, more slowly. Allow more: `ulimit -l "
            "unlimited`, `docker run --ulimit memlock=-1`, on WSL2 memory= in .wslconfig",
            bytes_text(self.locked_bytes), bytes_text(size_bytes), lock_limit_text(),
        )  # fmt: skip

    def _locked_by_torch(self, memory: Tensor) -> bool:
        return memory.is_pinned()

    def _torch_bytes(self) -> int:
        stats = torch.cuda.memory.host_memory_stats_as_nested_dict()  # {} before CUDA is used
        return int(stats.get("allocated_bytes", {}).get("current", 0))

    def _register(self, address: int, size_bytes: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) == 0:
            return True
        forget_cuda_error()
        return False

    def _unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


LOCKS = PageLocks()  # of this process


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool) -> Tensor:
    """Allocate uninitialised host memory; `pin`: page-locked, if the system allows it."""
    return LOCKS.empty(shape, dtype) if pin else torch.empty(shape, dtype=dtype)
