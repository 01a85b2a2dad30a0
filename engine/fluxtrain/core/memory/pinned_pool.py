"""Page-locked host buffers for offloaded activations, in exact sizes, used again every step.

torch's allocator of page-locked memory rounds up to powers of two: 896 MiB take a gigabyte.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Protocol

from torch import Tensor

from fluxtrain.core.device.arena import HostArena

_GROWTH = 5 / 4  # of a buffer that was too small: where sizes differ, few are made anew
_WASTE = 8  # a buffer this many times as large is not taken if a smaller one can be replaced


class Copy(Protocol):
    """A transfer from or to a buffer."""

    def wait_host(self) -> None:
        """Block this thread until the copy has been made."""


class PinnedBuffer(HostArena):
    """Memory for one tensor."""

    def __init__(self, size_bytes: int) -> None:
        self.unawaited: Copy | None = None  # a copy that the computation did not wait for
        super().__init__(size_bytes, pin=True)

    def tensor_like(self, tensor: Tensor) -> Tensor:
        """Return this memory as a tensor of the dtype and shape of `tensor`."""
        return self.tensor(tensor.dtype, tensor.numel(), 0).view(tensor.shape)


class PinnedPool:
    """The buffers that are free, by size."""

    def __init__(self) -> None:
        self._free: dict[int, deque[PinnedBuffer]] = {}
        # a thread that drops the last reference to an activation gives its buffer back
        self._guard = threading.RLock()

    def take(self, size_bytes: int) -> PinnedBuffer:
        """Return a buffer of `size_bytes` or, where sizes differ, more. Earlier copies from and to
        it come before later ones: the computation has waited for them, or this thread does."""
        buffer = self._taken(size_bytes)
        if buffer.unawaited is not None:
            with contextlib.suppress(Exception):
                buffer.unawaited.wait_host()
            buffer.unawaited = None
        return buffer

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Make a buffer free again."""
        with self._guard:
            self._free.setdefault(buffer.size_bytes, deque()).append(buffer)

    def clear(self) -> None:
        """Free the memory of all buffers that are free."""
        with self._guard:
            gone, self._free = self._free, {}
        gone.clear()

    def _taken(self, size_bytes: int) -> PinnedBuffer:
        with self._guard:
            if size_bytes in self._free:
                return self._pop(size_bytes)
            sizes = list(self._free)  # the collector may give one back meanwhile, on this thread
            smaller = [size for size in sizes if size < size_bytes]
            larger = [size for size in sizes if size > size_bytes]
            if larger and (min(larger) <= _WASTE * size_bytes or not smaller):
                return self._pop(min(larger))
            too_small = self._pop(max(smaller)) if smaller else None
        if too_small is None:
            return PinnedBuffer(size_bytes)
        larger_bytes = max(size_bytes, int(_GROWTH * too_small.size_bytes))
        del too_small  # unguarded: the thread whose copies it waits for may give a buffer back
        return PinnedBuffer(larger_bytes)

    def _pop(self, size: int) -> PinnedBuffer:
        buffers = self._free[size]
        buffer = buffers.popleft()
        if not buffers:
            del self._free[size]
        return buffer
