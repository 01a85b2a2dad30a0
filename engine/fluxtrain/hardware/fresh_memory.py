"""Fresh host memory as a run's arenas have it: zero, in huge pages where the system has any.

Linux gives huge pages on advice to private mappings. Python makes anonymous ones shared unless it
is told otherwise: those belong to shmem, whose huge pages are off on most systems. Sources:
madvise(2), Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from fluxtrain.units import MIB

HUGE_PAGE_BYTES = 2 * MIB
TOUCHED_BYTES = 16 * MIB  # smaller memory is locked within some milliseconds


def fresh(size_bytes: int) -> mmap.mmap:
    """A mapping of this process alone; its pages are made when they are first written."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= 2 * HUGE_PAGE_BYTES:  # where there is room for some
        _advise(memory, "MADV_HUGEPAGE")  # a kernel without them refuses: only speed is lost
    return memory


def touch(memory: mmap.mmap) -> bool:
    """Make the pages of a fresh mapping, which stay zero, with all of torch's threads:
    `cudaHostRegister` would make them in the one that calls it (docs/benchmarks.md). False where
    that would not be faster: little memory, one thread."""
    import torch

    if len(memory) < TOUCHED_BYTES or torch.get_num_threads() == 1:
        return False
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return True


def give_back(memory: mmap.mmap) -> None:
    """The pages of a mapping that was touched and not written: it is zero and costs nothing."""
    _advise(memory, "MADV_DONTNEED")


def keep_from_forks(memory: mmap.mmap) -> None:
    """What a device copies from must stay where it is. After a fork a write to a page that parent
    and child share would move it to another: so the child does not get this memory at all."""
    _advise(memory, "MADV_DONTFORK")


def _advise(memory: mmap.mmap, name: str) -> None:
    if (advice := getattr(mmap, name, None)) is not None:  # Linux has all of these
        with suppress(OSError):
            memory.madvise(advice)
