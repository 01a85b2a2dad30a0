"""Files of the token cache: whole or absent, and verified by one checksum when they are opened."""

from __future__ import annotations

import io
import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxtrain.files.atomic import replace_file
from fluxtrain.files.cache import Damaged
from fluxtrain.files.opening import open_plain, read_again, read_range

READ_BYTES = 1 << 20  # at once, while a checksum is verified


def write_numbers(path: Path, numbers: npt.NDArray[Any]) -> int:
    """Write an array; return its checksum."""
    data = np.ascontiguousarray(numbers).tobytes()
    replace_file(path, data)
    return zlib.crc32(data)


class Numbers:
    """An array of `write_numbers`, whose checksum is verified when it is opened."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, count: int, checksum: int) -> None:
        """Read the file once. Raises Damaged where it is not the one that was written, and
        ReadFailed where the disk fails."""
        self._path = path
        self._dtype = np.dtype(dtype)
        try:
            with open_plain(path) as file:
                found = read_again(partial(_checksum, file), path)
                self._inode = os.fstat(file.fileno()).st_ino
                self._data = np.memmap(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        if len(self._data) != count * self._dtype.itemsize or found != checksum:
            raise Damaged(f"{path} is cut off or damaged")

    def __len__(self) -> int:
        return len(self._data) // self._dtype.itemsize

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on. Raises ReadFailed where the disk fails or does
        not answer: at a mapped page that would end the process. The mapping serves where the cache
        was removed or built anew meanwhile."""
        size = self._dtype.itemsize
        first, length = start * size, count * size
        found = read_range(self._path, first, length, self._inode)
        return np.frombuffer(
            self._data[first : first + length].data if found is None else found, dtype=self._dtype
        )

    def whole(self) -> npt.NDArray[Any]:
        """Return all numbers. Raises ReadFailed as `read`."""
        return self.read(0, len(self))


def _checksum(file: io.FileIO) -> int:
    file.seek(0)
    checksum = 0
    while part := file.read(READ_BYTES):
        checksum = zlib.crc32(part, checksum)
    return checksum
