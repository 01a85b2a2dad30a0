"""Which of a model's weights are pages of its files, and which take memory of their own.

Weights in the dtype of their safetensors files are read through a memory map: they count to the
resident memory of the process while somebody reads them, and the kernel drops them when it needs
the room. Converted ones are copies in the heap, which come back when the weights move home.
Sources: proc_pid_maps(5), madvise(2), shm_overview(7).
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
    """Of weights on the host that are no pages of a file; all of them where nobody tells."""
    mapped = sum(p.nbytes for p in _mapped(model, maps))
    return sum(p.nbytes for p in model.parameters() if p.device.type == "cpu") - mapped


def cool(model: nn.Module, maps: Path = MAPS) -> None:
    """Let pages of the model's files count as what they are: the first that can be dropped.

    A control group counts those that were read twice (or by a fault, with multi-generational LRU)
    as in use. Nothing is dropped or written by this.
    """
    with suppress(OSError, AttributeError):  # another C library; an older kernel only refuses
        advise = ctypes.CDLL(None).madvise
        for weight in _mapped(model, maps):
            start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (weight.data_ptr() + weight.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLD)


def _mapped(model: nn.Module, maps: Path) -> Iterator[Tensor]:
    """Parameters on the host that are pages of a file; tied ones once."""
    starts, ends = _file_mappings(maps)
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and _within(parameter.data_ptr(), starts, ends):
            yield parameter


def _file_mappings(maps: Path) -> tuple[list[int], list[int]]:
    """[start, end) of every mapped file that stays without us, in the order of addresses."""
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
    """Are there pages of the file when nobody maps it? A model that was put into shared memory is
    there before and after; what has no name there (any more) goes with its last user."""
    if name.startswith("/dev/shm/"):
        return not name.endswith(" (deleted)")
    return not name.startswith(("/memfd:", "/dev/"))


def _within(address: int, starts: list[int], ends: list[int]) -> bool:
    at = bisect_right(starts, address) - 1
    return at >= 0 and address < ends[at]
