"""Keep the C library's heap small where the CPU computes, since tensors are allocated there.

A heap keeps freed memory for the next tensor. Activations that wait for the backward pass, and the
nodes of their graphs, are scattered among the freed ranges. Before version 2.39 glibc does not
reuse a hole even for a tensor of the size that left it: the slivers next to aligned memory stay in
lists that are not merged (sourceware bug 30723). So a heap grew with every block, to several times
what it held. Empty pages are given back to the system instead (malloc_trim(3)) when there are more
than a block needs; each costs a page fault when it is used again.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fluxtrain.units import MIB

SPARE_BYTES = 32 * MIB  # the heap may keep this much more than one block needs
FORGOTTEN_BLOCKS = 64  # after so many blocks, the need of one counts a third
STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def trim_heap() -> None:
    """Give the freed memory that the C library keeps back to the system."""
    with suppress(OSError, AttributeError):  # another C library: its allocator keeps some pages
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes(statm: Path = STATM) -> int:
    """Return resident bytes outside files and shared mappings: the heap, and arenas, which grow
    once. 0 where the kernel does not tell (proc(5))."""
    try:
        _, resident, shared, *_ = statm.read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


class Heap:
    """Trims the heap between two blocks; used by the thread that computes them."""

    def __init__(
        self,
        *,
        measure: Callable[[], int] = private_bytes,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self._measure = measure
        self._trim = trim
        self._least_bytes = measure()  # the least measured since the last trim
        self._needed_bytes = 0  # the most that one block took after a trim
        self._was_trimmed = False

    def tidy(self) -> None:
        """Trim the heap if more is free than a block needs and `SPARE_BYTES`."""
        now = self._measure()
        self._needed_bytes -= (
            self._needed_bytes // FORGOTTEN_BLOCKS
        )  # it may be too large: arenas grow once
        if self._was_trimmed:
            self._needed_bytes = max(self._needed_bytes, now - self._least_bytes)
            self._was_trimmed = False
        self._least_bytes = min(self._least_bytes, now)
        if now - self._least_bytes > self._needed_bytes + SPARE_BYTES:
            self._trim()
            self._least_bytes = self._measure()
            self._was_trimmed = True


class Spare(Protocol):
    """Holds memory that may be freed when the run needs it."""

    def give_back(self) -> None:
        """Give the memory back to the system, unless it is in use. Called by any thread."""


_SPARE: weakref.WeakSet[Spare] = weakref.WeakSet()


def note_spare(memory: Spare) -> None:
    """Remember memory to give back when little is left, as long as it lives."""
    _SPARE.add(memory)


def give_back_spare() -> None:
    """Give back what was noted."""
    for memory in list(_SPARE):
        memory.give_back()
