"""Host memory in exact sizes, page-locked where a GPU copies from it.

torch's pinned allocator rounds up to powers of two (up to 1.7x), so an arena is an anonymous
mapping of its own that is registered with CUDA. An arena that is not locked takes no memory before
it is written to, so it may be made long before it is filled.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator

import torch
from torch import Tensor

from fluxtrain.core.device import page_locks
from fluxtrain.machine.fresh_memory import fresh, give_back, keep_from_forks, touch

ALIGNMENT_BYTES = 128


def aligned(count_bytes: int) -> int:
    """Round up to the alignment that vector instructions and copies want."""
    return -(-count_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostArena:
    """One mapping of `size_bytes`, handed out as tensors that own their storage.

    It is zero-filled, and private to this process if it is not `shared`. Each tensor's storage
    spans just its own range: libraries that look for shared storages (safetensors) see separate
    tensors.

    A forked child can read an arena if it is not locked and made `for_forks`, as it was at the
    fork; it can read no other arena.

    Locked memory is unlocked once the copies from and to it have been made. The arena itself notes
    the copies: the garbage collector finalizes it and its users in any order.
    """

    under_way: dict[Hashable, Callable[[], None]]  # by stream or range: waits for its newest copy

    def __init__(
        self,
        size_bytes: int,
        *,
        pin: bool,
        for_forks: bool = False,
        shared: mmap.mmap | None = None,
    ) -> None:
        """shared: memory that other processes have, too, with its pages."""
        self.size_bytes, self.under_way = size_bytes, {}
        self._map = fresh(max(size_bytes, mmap.PAGESIZE)) if shared is None else shared
        touches = pin and page_locks.LOCKS.may_lock and shared is None
        touched = touches and touch(self._map)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        locked = pin and size_bytes > 0 and page_locks.LOCKS.lock(self.address, size_bytes, self)
        self.pinned_bytes = size_bytes if locked else 0
        self._locks = [self.address] if locked else []
        if locked or not for_forks:
            keep_from_forks(self._map)
        if touched and not locked:
            give_back(self._map)
        self._unlock = page_locks.LOCKS.unlock  # of the locks that hold it

    def tensor(self, dtype: torch.dtype, count: int, offset_bytes: int) -> Tensor:
        """Return a flat tensor (count,) over this arena's memory, which the tensor keeps alive."""
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset_bytes)

    def forget(self) -> None:
        """Free the pages of an arena that is not locked; it is zero again."""
        assert not self.pinned_bytes
        give_back(self._map)

    def forget_within(self, flat: Tensor, start: int, stop: int) -> bool:
        """Free the pages between two bytes of `flat`, and return True, where it lies in this arena,
        which must not be locked."""
        at = flat.data_ptr() - self.address
        if not 0 <= at < self.size_bytes:
            return False
        assert not self.pinned_bytes
        give_back(self._map, at + start, at + stop)
        return True

    def lock_parts(self, parts: Iterable[Tensor]) -> None:
        """Page-lock the memory of these of the arena's tensors, which is not locked as a whole."""
        page, spans = mmap.PAGESIZE, list[list[int]]()
        for start, stop in sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts):
            first, end = start // page * page, -(-stop // page) * page
            if spans and first <= spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([first, end])
        for first, end in spans:
            if page_locks.LOCKS.lock(first, end - first, self):
                self._locks.append(first)

    def __del__(self) -> None:
        if not getattr(self, "_locks", ()):
            return  # memory that is not locked is copied by threads, which hold it
        try:
            for wait in list(self.under_way.values()):
                with contextlib.suppress(Exception):  # the copy was never made
                    wait()
        finally:
            for address in self._locks:
                self._unlock(address)


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


BUFFER_BYTES = 8 << 20
BUFFERS = 2

Wait = Callable[[], None]
Send = Callable[[Tensor, Tensor], Wait]  # start the copy (to, from) and return its wait


class Staging:
    """A ring of page-locked buffers that copies from and to pageable host memory pass through, in
    one direction, on one thread.

    One chunk is copied on the host while the chunk before it crosses the bus, so the rate is the
    lower of the two. (The driver copies pageable memory too, but blocks the calling thread until
    all work queued before the copy is done.)
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES, buffers: int = BUFFERS) -> None:
        arena = HostArena(buffer_bytes * buffers, pin=True)
        self._buffers = [
            arena.tensor(torch.uint8, buffer_bytes, i * buffer_bytes) for i in range(buffers)
        ]
        self._arena = arena  # its `under_way` has the wait for each buffer's last copy
        self._turn = 0

    def upload(self, to: Tensor, source: Tensor, send: Send) -> None:
        """Copy host `source` to device `to`; on return the last chunk is still under way."""
        for target, chunk in self._chunks(to, source):
            turn, buffer = self._next(chunk.nbytes)
            self._arena.under_way.get(turn, _no_wait)()
            host_copy(buffer, chunk)
            self._arena.under_way[turn] = send(target, buffer)

    def download(self, to: Tensor, source: Tensor, send: Send) -> None:
        """Copy device `source` to host `to`; on return all bytes are there."""
        under_way: deque[tuple[Tensor, Tensor, Wait]] = deque()
        for target, chunk in self._chunks(to, source):
            if len(under_way) == len(self._buffers):
                _land(*under_way.popleft())
            turn, buffer = self._next(chunk.nbytes)
            wait = self._arena.under_way[turn] = send(buffer, chunk)
            under_way.append((target, buffer, wait))
        while under_way:
            _land(*under_way.popleft())

    def _next(self, size_bytes: int) -> tuple[int, Tensor]:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._turn, self._buffers[self._turn][:size_bytes]

    def _chunks(self, to: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut both tensors, as bytes, into chunks of a buffer's size."""
        step = self._buffers[0].nbytes
        flats = (to.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))
        return zip(*(flat.split(step) for flat in flats), strict=True)


def host_copy(to: Tensor, source: Tensor) -> None:
    """Copy equal sizes in host memory on this thread, without holding the GIL."""
    assert to.nbytes == source.nbytes
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def _land(to: Tensor, buffer: Tensor, wait: Wait) -> None:
    wait()
    host_copy(to, buffer)


def _no_wait() -> None:
    """Return at once: the buffer was never used."""
