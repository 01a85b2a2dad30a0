"""Files of numbers with a checksum for each block, which is verified when a block is first read."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxtrain.files.atomic import replace_file
from fluxtrain.files.cache import Damaged
from fluxtrain.files.opening import open_plain, read_range

BLOCK_BYTES = 1 << 16  # with less the checksums take room, with more a random read takes time


def write_numbers(path: Path, numbers: npt.NDArray[Any]) -> int:
    """Write an array behind the checksums of its blocks; return the checksum of these."""
    data = np.ascontiguousarray(numbers).tobytes()
    sums = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    head = np.asarray([len(data), len(sums)], dtype="<u8").tobytes()
    listed = np.asarray(sums, dtype="<u4").tobytes()
    guard = zlib.crc32(head + listed)
    replace_file(path, head + guard.to_bytes(4, "little") + listed + data)
    return guard


class Numbers:
    """An array of `write_numbers`, mapped into memory."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, guard: int | None = None) -> None:
        """Raises Damaged where the file is not whole, or not the one whose `guard` was returned."""
        self._path = path
        self._dtype = np.dtype(dtype)
        try:
            with open_plain(path) as file:
                mapped = np.memmap(file, dtype=np.uint8, mode="r")
                self._inode = os.fstat(file.fileno()).st_ino
        except (OSError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        size, blocks = (int(one) for one in mapped[:16].view("<u8")) if len(mapped) > 20 else (0, 0)
        begin = 20 + 4 * blocks
        if not size or begin + size != len(mapped):
            raise Damaged(f"{path} is cut off or damaged")
        listed = mapped[20:begin]
        found = int(mapped[16:20].view("<u4")[0])
        if zlib.crc32(mapped[:16].tobytes() + listed.tobytes()) != found:
            raise Damaged(f"{path} is damaged")
        if guard not in (None, found) or size % self._dtype.itemsize:
            raise Damaged(f"{path} belongs to other data")
        self._begin = begin
        self._sums = np.frombuffer(listed.tobytes(), dtype="<u4")
        self._data = mapped[begin:]
        self._verified = np.zeros(blocks, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._data) // self._dtype.itemsize

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on. Raises Damaged where a checksum does not fit, and
        ReadFailed where the disk fails or does not answer."""
        first, last = start * self._dtype.itemsize, (start + count) * self._dtype.itemsize
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            if not self._verified[block]:
                end = min((block + 1) * BLOCK_BYTES, len(self._data))
                if zlib.crc32(self._bytes(block * BLOCK_BYTES, end)) != self._sums[block]:
                    raise Damaged(f"{self._path} is damaged in its block {block}")
                self._verified[block] = True
        return np.frombuffer(self._bytes(first, last), dtype=self._dtype)

    def _bytes(self, first: int, last: int) -> bytes | memoryview:
        """Read a range: a failing disk raises an error, where it would end the process at a mapped
        page. The mapping serves where the cache was removed or built anew meanwhile."""
        found = read_range(self._path, self._begin + first, last - first, self._inode)
        return self._data[first:last].data if found is None else found

    def whole(self) -> npt.NDArray[Any]:
        """Return all numbers. Raises Damaged as `read`."""
        return self.read(0, len(self))
