"""Page-locked host memory that boundary activations wait in, in exact sizes, used again every step.

torch's allocator of page-locked memory rounds up to powers of two: 896 MiB take a gigabyte.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fluxtrain.memory.arena import HostArena

_GROWTH = 5 / 4  # of one that was too small: where sizes differ, few are made anew


class Copy(Protocol):
    """A ticket of a copy from or to a home."""

    def wait_host(self) -> None:
        """Until it has been made."""


class Home:
    """Memory for one tensor. It is freed once the copies from and to it have been made."""

    def __init__(self, size_bytes: int) -> None:
        self.arena = HostArena(size_bytes, pin=True)
        self.size_bytes = size_bytes
        self.copies: Sequence[Copy] = ()  # of its last use
        self.unordered: Copy | None = None  # one of them that the computation did not wait for

    def tensor(self, like: Tensor) -> Tensor:
        """Memory for `like`'s elements, in its shape."""
        return self.arena.tensor(like.dtype, like.numel(), 0).view(like.shape)

    def __del__(self) -> None:
        for copy in getattr(self, "copies", ()):
            with contextlib.suppress(Exception):  # it was never made
                copy.wait_host()


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

    def _taken(self, size_bytes: int) -> Home:
        with self._guard:
            sizes = [size_bytes] if size_bytes in self._free else sorted(self._free)
            for size in sizes:
                if size >= size_bytes:
                    return self._pop(size)
            if not sizes:
                return Home(size_bytes)
            self._pop(sizes[-1])  # its place is taken by a larger one
            return Home(max(size_bytes, int(_GROWTH * sizes[-1])))

    def _pop(self, size: int) -> Home:
        homes = self._free[size]
        home = homes.popleft()
        if not homes:
            del self._free[size]
        return home
