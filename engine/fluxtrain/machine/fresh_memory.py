"""Allocates fresh host memory for a run's arenas: zero, in huge pages where the system has any.

Linux gives huge pages on advice to private mappings. Python's anonymous mappings are shared unless
told otherwise; shared ones belong to shmem, whose huge pages are off on most systems. Sources:
madvise(2), Documentation/admin-guide/mm/transhuge.rst.

A forked child (a data loader's worker) shares the pages of private memory until parent or child
writes to them. That costs the parent its huge pages and the machine a second copy of what a step
writes, and moves the pages that a device copies from. So a child does not get this memory: the
kernel leaves its mapping empty, and reading there ends the child instead of giving it zeros for
weights (docs/decisions/0013-what-a-fork-gets.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from weakref import WeakSet

from fluxtrain.units import MIB

HUGE_PAGE_BYTES = 2 * MIB
TOUCHED_BYTES = 16 * MIB  # smaller memory is locked within some milliseconds


def fresh(size_bytes: int) -> mmap.mmap:
    """Map memory for this process alone; its pages are made when they are first written."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= 2 * HUGE_PAGE_BYTES:  # where there is room for some
        _advise(memory, "MADV_HUGEPAGE")  # a kernel without them refuses: only speed is lost
    return memory


def of_file(file: int, size_bytes: int, offset: int) -> mmap.mmap:
    """Map a range of a file that other processes map, too; what one writes all see."""
    memory = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED, offset=offset)
    _advise(memory, "MADV_HUGEPAGE")
    return memory


def touch(memory: mmap.mmap) -> bool:
    """Make the pages of a fresh mapping, which stay zero, with all of torch's threads:
    `cudaHostRegister` would make them in the calling thread alone (docs/benchmarks.md). Return
    False if that would not be faster: little memory, one thread."""
    import torch

    if len(memory) < TOUCHED_BYTES or torch.get_num_threads() == 1:
        return False
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return True


def give_back(memory: mmap.mmap, start: int = 0, stop: int | None = None) -> None:
    """Free the pages of a mapping, or those that lie whole between two of its bytes; they are zero
    from then on."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = len(memory) if stop is None else stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and (advice := getattr(mmap, "MADV_DONTNEED", None)) is not None:
        with suppress(OSError):
            memory.madvise(advice, first, end - first)


def keep_from_forks(memory: mmap.mmap) -> None:
    """Hide this memory from children forked from now on: they cannot read or share its pages."""
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except OSError:  # before Linux 4.14: a child shares the pages
        return
    _KEPT.add(memory)


_MADV_WIPEONFORK = 18  # a constant that Python does not name
_PROT_NONE = 0  # mprotect(2)
_KEPT: WeakSet[mmap.mmap] = WeakSet()

if hasattr(os, "register_at_fork"):  # POSIX
    _LIBC = ctypes.CDLL(None)  # not in a child: another thread may hold the lock

    def _close_in_child() -> None:
        """Close these mappings to the child. They stay mapped, so that the child's own memory lies
        elsewhere, whichever copies of arenas it frees."""
        for memory in _KEPT:
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            _LIBC.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), _PROT_NONE)

    os.register_at_fork(after_in_child=_close_in_child)


def _advise(memory: mmap.mmap, name: str) -> None:
    if (advice := getattr(mmap, name, None)) is not None:  # Linux has all of these
        with suppress(OSError):
            memory.madvise(advice)
