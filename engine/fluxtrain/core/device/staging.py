"""A ring of page-locked buffers that copies from and to pageable host memory pass through.

One chunk is copied on the host while the chunk before it crosses the bus, so the rate is the lower
of the two: a copy in host memory by one thread, or the bus. (The driver copies pageable memory too,
but blocks the calling thread until all work queued before the copy is done.)
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena

BUFFER_BYTES = 8 << 20
BUFFERS = 2

Wait = Callable[[], None]
Send = Callable[[Tensor, Tensor], Wait]  # start the copy (to, from) and return its wait


class Staging:
    """The buffers of one direction, used by one thread."""

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
