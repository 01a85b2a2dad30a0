"""The C library's heap, kept small where the processor computes: its tensors lie there.

A heap keeps what is freed, for the next tensor. Those that wait between forward and backward, and
the nodes of their graphs, stand among what is freed, and before version 2.39 glibc never reuses
a hole for a tensor of the very size that left it: the slivers beside aligned memory stay in lists
that are not merged (sourceware bug 30723). So a heap grew with every block, to several times of
what it held. Pages that hold nothing are given back to the system instead (malloc_trim(3)) when
there are more of them than a block needs; they cost a page fault each when they are used again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fluxtrain.units import MIB

SPARE_BYTES = 32 * MIB  # that the heap may keep beside what one block needs
FORGOTTEN_BLOCKS = 64  # after so many, what one needed counts a third
STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def trim_heap() -> None:
    """What the C library keeps of freed memory goes back to the system."""
    with suppress(OSError, AttributeError):  # another C library: its allocator keeps some pages
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes(statm: Path = STATM) -> int:
    """Resident memory that is neither of files nor of shared mappings: the heap, and arenas, which
    grow once. 0 where the kernel does not tell (proc(5))."""
    try:
        _, resident, shared, *_ = statm.read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


class Heap:
    """Looked at between two blocks, by the thread that computes them."""

    def __init__(
        self,
        *,
        measure: Callable[[], int] = private_bytes,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._measure = measure
        self._trim = trim
        self._least_bytes = measure()  # since the last trim: what was in use, and what came since
        self._needed_bytes = 0  # that one block took after a trim, at most
        self._was_trimmed = False

    def tidy(self) -> None:
        """Give back what is free, if it is more than a block needs and `SPARE_BYTES`."""
        now = self._measure()
        self._needed_bytes -= self._needed_bytes // FORGOTTEN_BLOCKS  # arenas may have grown in one
        if self._was_trimmed:
            self._needed_bytes = max(self._needed_bytes, now - self._least_bytes)
            self._was_trimmed = False
        self._least_bytes = min(self._least_bytes, now)
        if now - self._least_bytes > self._needed_bytes + SPARE_BYTES:
            self._trim()
            self._least_bytes = self._measure()
            self._was_trimmed = True
