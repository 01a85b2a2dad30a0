"""Host memory for the copies that checkpoints in the background are written from.

The kernel makes pages when they are first written, a gigabyte a second or less. A copy into fresh
memory would hold the training up for that long, so the pages are made before the first checkpoint
is due, slowly, and stay for the next ones: until little memory is left.
"""

from __future__ import annotations

import ctypes
import threading
import time

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena, aligned
from fluxtrain.core.device.heap import note_spare

PIECE_BYTES = 16 << 20
_BETWEEN_BYTES = 16 << 20  # of all tensors, which begin at aligned addresses
SHARE = 0.2  # of a thread's time goes into making pages


class CopyMemory:
    """One mapping that is filled from its beginning by each checkpoint; used by one at a time."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes` hold the tensors of one checkpoint."""
        try:
            self._arena = HostArena(size_bytes + _BETWEEN_BYTES, pin=False)
        except (OSError, MemoryError):  # a limit of addresses: each copy has fresh memory
            self._arena = HostArena(0, pin=False)
        self._used_bytes = 0
        self._in_use = False
        self._lock = threading.Lock()
        self._stops = threading.Event()
        self._maker: threading.Thread | None = None
        self.made_bytes = 0  # of pages ahead
        note_spare(self)

    def make_ahead(self) -> None:
        """Begin to make the pages, on a thread; once."""
        if self._maker is None and not self._stops.is_set():
            maker = threading.Thread(target=self._make, name="copy-memory", daemon=True)
            try:
                maker.start()
            except RuntimeError:  # a limit of threads: the pages are made as they are written
                self._stops.set()
            else:
                self._maker = maker

    def begin(self) -> None:
        """Use the memory from its beginning again: nothing reads what was there."""
        self._stops.set()
        if self._maker is not None:
            self._maker.join()
        with self._lock:
            self._in_use, self._used_bytes = True, 0

    def end(self) -> None:
        """Nothing reads the copies any more."""
        with self._lock:
            self._in_use = False

    def give_back(self) -> None:
        """Give the pages back, unless copies are in them; the next ones are made as they are
        written."""
        self._stops.set()
        with self._lock:
            if not self._in_use:
                self._arena.forget()

    def like(self, tensor: Tensor) -> Tensor:
        """Return memory for a copy of a tensor, contiguous and in its shape; fresh memory where
        there is no more."""
        size_bytes = aligned(tensor.nbytes)
        with self._lock:
            at = self._used_bytes
            if not tensor.nbytes or at + size_bytes > self._arena.size_bytes:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
            self._used_bytes += size_bytes
        return self._arena.tensor(tensor.dtype, tensor.numel(), at).view(tensor.shape)

    def close(self) -> None:
        """End the thread."""
        self._stops.set()

    def _make(self) -> None:
        size_bytes = self._arena.size_bytes
        for at in range(0, size_bytes, PIECE_BYTES):
            started_s = time.monotonic()
            count = min(PIECE_BYTES, size_bytes - at)
            ctypes.memset(self._arena.address + at, 0, count)  # without holding the GIL
            self.made_bytes += count
            took_s = time.monotonic() - started_s
            if self._stops.wait(took_s * (1 / SHARE - 1)):
                return
