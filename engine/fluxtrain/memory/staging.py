"""A ring of page-locked buffers that copies from and to other host memory pass through.

One piece is copied on the host while the one before crosses the bus, so the rate is that of the
slower of the two: a copy in host memory by one thread, or the bus. (The driver's own way with such
memory makes the thread that asks for a copy wait until all work queued before it is done.)
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fluxtrain.memory.arena import HostArena

PIECE_BYTES = 8 << 20
PIECES = 2

Wait = Callable[[], None]
Send = Callable[[Tensor, Tensor], Wait]  # start the copy (to, from); the result waits for it


class Staging:
    """The buffers of one direction, used by one thread."""

    def __init__(self, piece_bytes: int = PIECE_BYTES, pieces: int = PIECES) -> None:
        arena = HostArena(piece_bytes * pieces, pin=True)
        self._buffers = [
            arena.tensor(torch.uint8, piece_bytes, i * piece_bytes) for i in range(pieces)
        ]
        self._arena = arena  # which knows of each buffer how to wait for its last copy
        self._turn = 0

    def up(self, to: Tensor, source: Tensor, send: Send) -> None:
        """Host `source` to device `to`; when this returns, the last piece is on its way."""
        for target, piece in self._pieces(to, source):
            turn, buffer = self._next(piece.nbytes)
            self._arena.under_way.get(turn, _nothing)()
            host_copy(buffer, piece)
            self._arena.under_way[turn] = send(target, buffer)

    def down(self, to: Tensor, source: Tensor, send: Send) -> None:
        """Device `source` to host `to`; when this returns, all bytes are there."""
        under_way: deque[tuple[Tensor, Tensor, Wait]] = deque()
        for target, piece in self._pieces(to, source):
            if len(under_way) == len(self._buffers):
                _land(*under_way.popleft())
            turn, buffer = self._next(piece.nbytes)
            wait = self._arena.under_way[turn] = send(buffer, piece)
            under_way.append((target, buffer, wait))
        while under_way:
            _land(*under_way.popleft())

    def _next(self, size_bytes: int) -> tuple[int, Tensor]:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._turn, self._buffers[self._turn][:size_bytes]

    def _pieces(self, to: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Both as bytes, cut alike."""
        step = self._buffers[0].nbytes
        flats = (to.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))
        return zip(*(flat.split(step) for flat in flats), strict=True)


def host_copy(to: Tensor, source: Tensor) -> None:
    """One-threaded copy of equal sizes in host memory that does not hold the GIL."""
    assert to.nbytes == source.nbytes
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def _land(to: Tensor, buffer: Tensor, wait: Wait) -> None:
    wait()
    host_copy(to, buffer)


def _nothing() -> None:
    """Nobody has used the buffer yet."""
