"""Which of a model's weights are pages of its files, and which take memory of their own.

Weights in the dtype of their safetensors files are read through a memory map: they count to the
resident memory of the process while somebody reads them, and the kernel drops them when it needs
the room. Converted and pickled weights are copies in the heap. Source: proc_pid_maps(5).
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from torch import nn

MAPS = Path("/proc/self/maps")


def copied_bytes(model: nn.Module, maps: Path = MAPS) -> int:
    """Of weights on the host that are no pages of a file; all of them where nobody tells."""
    starts, ends = _file_mappings(maps)
    return sum(
        p.nbytes
        for p in model.parameters()
        if p.device.type == "cpu" and not _within(p.data_ptr(), starts, ends)
    )


def _file_mappings(maps: Path) -> tuple[list[int], list[int]]:
    """[start, end) of every mapped file that has a name on a disk, in the order of addresses."""
    starts, ends = [], []
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return [], []
    for line in lines:
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        if inode != "0" and name and not name[0].startswith(("/memfd:", "/dev/")):
            start, end = (int(address, 16) for address in addresses.split("-"))
            starts.append(start)
            ends.append(end)
    return starts, ends


def _within(address: int, starts: list[int], ends: list[int]) -> bool:
    at = bisect_right(starts, address) - 1
    return at >= 0 and address < ends[at]
