"""Page-locked host memory that boundary activations wait in, in exact sizes, used again every step.

torch's allocator of page-locked memory rounds up to powers of two: 896 MiB take a gigabyte.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Protocol

from torch import Tensor

from fluxtrain.device.arena import HostArena

_GROWTH = 5 / 4  # of one that was too small: where sizes differ, few are made anew
_WASTE = 8  # times: one so much larger is left to what needs it, if a smaller one can be replaced


class Copy(Protocol):
    """A transfer of a copy from or to a home."""

    def wait_host(self) -> None:
        """Until it has been made."""


class Home(HostArena):
    """Memory for one tensor."""

    def __init__(self, size_bytes: int) -> None:
        self.unordered: Copy | None = None  # one that the computation did not wait for
        super().__init__(size_bytes, pin=True)

    def tensor_like(self, tensor: Tensor) -> Tensor:
        """Memory for `tensor`'s elements, in its shape."""
        return self.tensor(tensor.dtype, tensor.numel(), 0).view(tensor.shape)


class BoundaryHomes:
    """Homes that are free, by size."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Home]] = {}
        self._guard = threading.RLock()  # whoever drops the last reference gives one back

    def take(self, size_bytes: int) -> Home:
        """One of `size_bytes` or, where sizes differ, more. What was copied from or to it before
        comes before what is copied next: the computation has waited for it, or this thread does."""
        home = self._taken(size_bytes)
        if home.unordered is not None:
            with contextlib.suppress(Exception):
                home.unordered.wait_host()
            home.unordered = None
        return home

    def give_back(self, home: Home) -> None:
        """It is free again."""
        with self._guard:
            self._free.setdefault(home.size_bytes, deque()).append(home)

    def clear(self) -> None:
        """Give the memory back of all that are free."""
        with self._guard:
            gone, self._free = self._free, {}
        gone.clear()

    def _taken(self, size_bytes: int) -> Home:
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
            return Home(size_bytes)
        larger_bytes = max(size_bytes, int(_GROWTH * too_small.size_bytes))
        del too_small  # unguarded: whoever makes the copies that it waits for may give one back
        return Home(larger_bytes)

    def _pop(self, size: int) -> Home:
        homes = self._free[size]
        home = homes.popleft()
        if not homes:
            del self._free[size]
        return home
