"""Tell which of a model's weights are pages of its files, and which take memory of their own.

Weights in the dtype of their safetensors files are read through a memory map: they count as
resident memory of the process while they are read, and the kernel drops them when it needs the
memory. Converted weights are copies in the heap, which are freed when the weights move to the host
arenas. Sources: proc_pid_maps(5), madvise(2), posix_fadvise(2), shm_overview(7).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

MAPS = Path("/proc/self/maps")
SMAPS = Path("/proc/self/smaps")
_MADV_COLD = 20  # Linux 5.4; Python names it from 3.15 on
_MADV_DONTNEED = 4


@dataclass(frozen=True)
class _Mapping:
    """The addresses [start, end) of a file's bytes from `offset` on."""

    start: int
    end: int
    offset: int
    name: str


def copied_bytes(model: nn.Module, maps: Path = MAPS) -> int:
    """Return the bytes of host weights that are no pages of a file; of all weights where the
    system does not say."""
    mapped = sum(p.nbytes for p in _mapped(model, maps))
    every = (p for p in model.parameters() if p.device.type == "cpu")
    return sum(min(p.nbytes, p.untyped_storage().nbytes()) for p in every) - mapped


def cool(model: nn.Module, maps: Path = MAPS) -> None:
    """Mark pages of the model's files as the first that the kernel may drop.

    A control group counts pages read twice (or by a fault, with multi-generational LRU) as in use.
    This call drops and writes nothing.
    """
    for weight in _mapped(model, maps):
        _advise(*_whole_pages(weight), _MADV_COLD)


def resident_bytes(model: nn.Module, smaps: Path = SMAPS) -> int:
    """Return the bytes of `model` that count as memory of this process now: copies, and the pages
    of its files that were read; all of its weights where the system does not tell."""
    mappings = _file_mappings(MAPS)
    here = [p for p in model.parameters() if p.device.type == "cpu"]
    every = sum(p.nbytes for p in here)
    starts = {found.start for p in here if (found := _mapping_of(p.data_ptr(), mappings))}
    if not starts:
        return every
    read, counts = 0, False
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return every
    for line in lines:
        word, *rest = line.split(maxsplit=2)
        if "-" in word and not word.endswith(":"):
            counts = int(word.partition("-")[0], 16) in starts
        elif counts and word == "Rss:":
            read += int(rest[0]) << 10
    return copied_bytes(model) + read


def drop(weight: Tensor, maps: Path = MAPS, *, from_cache: bool = True) -> int:
    """Free the pages of its file that `weight` was read from, here and in the page cache, so that a
    model that is read once neither fills the memory nor pushes other files out. `from_cache` False
    leaves the page cache alone.

    Return the bytes of these pages; 0, and nothing is done, for memory that is no file's. Changes
    that were written to a mapped weight are lost with its pages: for weights that are not read
    again. The page cache keeps pages that another process has mapped.
    """
    mapping = _mapping_of(weight.data_ptr(), _file_mappings(maps))
    start, size = _whole_pages(weight)
    if mapping is None or not weight.is_contiguous() or size <= 0 or start + size > mapping.end:
        return 0
    if not _advise(start, size, _MADV_DONTNEED):
        return 0
    if not from_cache:
        return size
    with suppress(OSError, AttributeError):  # renamed or deleted meanwhile; no such call
        fd = os.open(mapping.name, os.O_RDONLY)
        try:
            offset = mapping.offset + start - mapping.start
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return size


def _whole_pages(weight: Tensor) -> tuple[int, int]:
    """Return address and size of the pages inside a range; a size of 0 or less for none."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, end - start


def _advise(start: int, size: int, advice: int) -> bool:
    """Call madvise(2); return whether the kernel took the advice."""
    if size <= 0:
        return False
    with suppress(OSError, AttributeError):  # another C library; an older kernel only refuses
        advise = ctypes.CDLL(None).madvise
        return bool(advise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0)
    return False


def _mapped(model: nn.Module, maps: Path) -> Iterator[Tensor]:
    """Yield the parameters on the host that are pages of a file; tied ones once."""
    mappings = _file_mappings(maps)
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and _mapping_of(parameter.data_ptr(), mappings):
            yield parameter


def _file_mappings(maps: Path) -> list[_Mapping]:
    """Return every mapped file that outlives its mapping, in address order."""
    found: list[_Mapping] = []
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        addresses, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode != "0" and name and _stays(name[0]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(_Mapping(start, end, int(offset, 16), name[0]))
    return found


def _stays(name: str) -> bool:
    """Return whether the file's pages stay without a mapping. A named file in shared memory stays;
    one without a name (or deleted) ends with its last user."""
    if name.startswith("/dev/shm/"):
        return not name.endswith(" (deleted)")
    return not name.startswith(("/memfd:", "/dev/"))


def _mapping_of(address: int, mappings: list[_Mapping]) -> _Mapping | None:
    at = bisect_right(mappings, address, key=lambda mapping: mapping.start) - 1
    return mappings[at] if at >= 0 and address < mappings[at].end else None
