"""What the kernel says of a tensor's memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
from pathlib import Path

from torch import Tensor


def made_bytes(memory: Tensor) -> int:
    """Of what there are pages for (mincore(2)); it begins with one."""
    return made_bytes_at(memory.data_ptr(), memory.nbytes)


def made_bytes_at(address: int, size_bytes: int) -> int:
    """Of what there are pages for from an address on; 0 where something of it is not mapped. Other
    than the growth of the process it does not tell of what the rest of the process does."""
    made = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), made):
        assert ctypes.get_errno() == errno.ENOMEM
        return 0
    return sum(page & 1 for page in made) * mmap.PAGESIZE


def mapped(memory: Tensor) -> tuple[str, set[str]]:
    """What smaps says of the mapping that this memory is in: permissions and flags."""
    address, found = memory.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ranges := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            first, last, permissions = ranges.groups()
            found = int(first, 16) <= address < int(last, 16)
        elif found and line.startswith("VmFlags:"):
            return permissions, set(line.split()[1:])
    raise AssertionError("no such memory")
