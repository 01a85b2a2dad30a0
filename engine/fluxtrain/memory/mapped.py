"""Tell which of a model's weights are pages of its files, and which take memory of their own.

Weights in the dtype of their safetensors files are read through a memory map: they count as
resident memory of the process while they are read, and the kernel drops them when it needs the
memory. Converted weights are copies in the heap, which are freed when the weights move to the host
arenas. Sources: proc_pid_maps(5), madvise(2), shm_overview(7).
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor, nn

MAPS = Path("/proc/self/maps")
_MADV_COLD = 20  # Linux 5.4; Python names it from 3.15 on


def copied_bytes(model: nn.Module, maps: Path = MAPS) -> int:
    """Return the bytes of weights on the host that are no pages of a file; of all weights where the
    system does not tell."""
    mapped = sum(p.nbytes for p in _mapped(model, maps))
    every = (p for p in model.parameters() if p.device.type == "cpu")
    return sum(min(p.nbytes, p.untyped_storage().nbytes()) for p in every) - mapped


def cool(model: nn.Module, maps: Path = MAPS) -> None:
    """Mark pages of the model's files as the first ones that the kernel may drop.

    A control group counts pages that were read twice (or by a fault, with multi-generational LRU)
    as in use. This call drops and writes nothing.
    """
    with suppress(OSError, AttributeError):  # another C library; an older kernel only refuses
        advise = ctypes.CDLL(None).madvise
        for weight in _mapped(model, maps):
            start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (weight.data_ptr() + weight.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLD)


def _mapped(model: nn.Module, maps: Path) -> Iterator[Tensor]:
    """Yield the parameters on the host that are pages of a file; tied ones once."""
    starts, ends = _file_mappings(maps)
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and _within(parameter.data_ptr(), starts, ends):
            yield parameter


def _file_mappings(maps: Path) -> tuple[list[int], list[int]]:
    """Return [start, end) of every mapped file that outlives its mapping, in address order."""
    starts, ends = [], []
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return [], []
    for line in lines:
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        if inode != "0" and name and _stays(name[0]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            starts.append(start)
            ends.append(end)
    return starts, ends


def _stays(name: str) -> bool:
    """True when the file's pages stay without a mapping. A named file in shared memory stays; one
    without a name (or deleted) ends with its last user."""
    if name.startswith("/dev/shm/"):
        return not name.endswith(" (deleted)")
    return not name.startswith(("/memfd:", "/dev/"))


def _within(address: int, starts: list[int], ends: list[int]) -> bool:
    at = bisect_right(starts, address) - 1
    return at >= 0 and address < ends[at]
