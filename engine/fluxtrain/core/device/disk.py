"""Weights in files: read by direct I/O, several blocks at a time, and checked block by block.

A `WeightsFile` is the home of frozen weights that the host does not hold. It is only read, past the
page cache, which would take the host memory that the file is to save. Each block has an xxh3 sum in
memory, taken from bytes that were known to be right; another sum is read once more, which mends
what went wrong on the way, and then refused.

A thread reads and sums 2 to 3 GB/s. `READERS` of them keep a disk as busy as it can be (measured:
102 % of the rate of plain reading).
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from fluxtrain.core.device.arena import HostArena, Send
from fluxtrain.core.device.worker import Worker
from fluxtrain.errors import ReadFailed
from fluxtrain.plan.depths import DISK_BLOCK_BYTES as BLOCK_BYTES
from fluxtrain.plan.depths import DISK_READERS as READERS
from fluxtrain.plan.depths import DISK_RING_BYTES
from fluxtrain.units import bytes_text

PAGE_BYTES = 4096  # of addresses, sizes and offsets of direct reads
_CURE = (
    "the run's checkpoints are whole: go on with --resume auto, which writes these weights to the "
    "disk anew, and have the disk checked (smartctl -a)"
)


def sums_of(weights: Tensor) -> tuple[int, ...]:
    """Return the xxh3 sum of each block of weights (bytes,) uint8 in host memory."""
    return tuple(map(sum_of, weights.split(BLOCK_BYTES)))


def sum_of(block: Tensor) -> int:
    """Return the xxh3 sum of bytes (n,) uint8 in host memory."""
    return xxhash.xxh3_64_intdigest(block.numpy().data)


def set_direct(file: int, *, writes: bool = False) -> bool:
    """Let reads, or also `writes`, of an open file pass by the page cache; False where the file
    system refuses that, some only when the first byte moves."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    arena = HostArena(PAGE_BYTES, pin=False)
    page = arena.tensor(torch.uint8, PAGE_BYTES, 0)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        if writes:
            os.pwritev(file, [page.numpy().data], 0)
        os.preadv(file, [page.numpy().data], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


class WeightsFile:
    """A file that begins with the weights of a group. Any thread may read it."""

    def __init__(self, path: Path, size_bytes: int, sums: Sequence[int]) -> None:
        """Open the file, whose first `size_bytes` have these sums. It is kept open: another program
        may remove it. Raises ReadFailed."""
        self.path, self.size_bytes, self._sums = path, size_bytes, tuple(sums)
        self.mended: list[int] = []  # blocks that were right when they were read again
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadFailed(f"{path} cannot be opened ({error.strerror}): {_CURE}") from error
        self.is_direct = set_direct(self._fd)

    def block_bytes(self, number: int) -> int:
        """Return the size of a block: the last one may be smaller."""
        return min(BLOCK_BYTES, self.size_bytes - number * BLOCK_BYTES)

    def read(self, number: int, into: Tensor) -> None:
        """Read a block to the beginning of `into` (BLOCK_BYTES,) uint8, which begins at a page.

        Raises ReadFailed where it is not what was written, also the second time.
        """
        trouble = self._try(number, into)
        if not trouble:
            return
        if again := self._try(number, into):
            start = number * BLOCK_BYTES
            raise ReadFailed(
                f"{self.path}, {bytes_text(self.block_bytes(number))} at byte {start:,}: {again}, "
                f"also when they were read again: {_CURE}"
            )
        self.mended.append(number)

    def read_all(self) -> Tensor:
        """Read the weights (size_bytes,) uint8 to host memory. Raises ReadFailed."""
        count = -(-self.size_bytes // BLOCK_BYTES)
        arena = HostArena(count * BLOCK_BYTES, pin=False)
        for at in range(count):
            self.read(at, arena.tensor(torch.uint8, BLOCK_BYTES, at * BLOCK_BYTES))
        return arena.tensor(torch.uint8, self.size_bytes, 0)

    def _try(self, number: int, into: Tensor) -> str:
        """Read a block; return what is wrong with it, in words."""
        wanted = self.block_bytes(number)
        try:
            done = self._fill(number * BLOCK_BYTES, wanted, into.numpy().data)
        except OSError as error:
            return error.strerror or str(error)
        if done < wanted:
            return f"the file ends after {done:,} of them: it was cut"
        if sum_of(into[:wanted]) != self._sums[number]:
            return "they are not the bytes that were written"
        return ""

    def _fill(self, start: int, wanted: int, into: memoryview) -> int:
        """Read whole pages, past the block's end where the file goes on; return the bytes read."""
        done = 0
        while done < wanted:
            count = os.preadv(self._fd, [into[done:]], start + done)
            done += count
            if count == 0 or count % PAGE_BYTES:
                break  # the file's end
        if not self.is_direct:  # the system need not keep what is read once a pass
            os.posix_fadvise(self._fd, start, done, os.POSIX_FADV_DONTNEED)
        return min(done, wanted)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            with suppress(OSError):
                os.close(self._fd)


class WeightsSource(Protocol):
    """What `DiskReads` reads blocks of: a `WeightsFile`, or a part of the scratch file."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, number: int, into: Tensor) -> None:
        """Read a block to the beginning of `into`, as `WeightsFile.read`."""


FilePart = tuple[int, WeightsSource]  # where its bytes begin in a copy of the group


class DiskReads:
    """The threads and page-locked buffers through which one device gets weights from files."""

    def __init__(self, *, pin: bool) -> None:
        self._arena = HostArena(DISK_RING_BYTES, pin=pin)
        self._buffers = [
            self._arena.tensor(torch.uint8, BLOCK_BYTES, start)
            for start in range(0, DISK_RING_BYTES, BLOCK_BYTES)
        ]
        self._turn = 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="flux-disk-read")
        self.worker = Worker("flux-disk")  # runs one `copy` after the other
        self.read_bytes = 0  # of files, since the start: the scratch file counts its own

    def copy(self, to: Tensor, parts: Sequence[FilePart], send: Send) -> None:
        """Copy files to their places in device memory `to` (bytes,); on return the last blocks are
        still on their way from the buffers. Raises ReadFailed."""
        reads: deque[tuple[Tensor, int, Future[None]]] = deque()
        try:
            for target, file, number in _blocks(to, parts):
                if len(reads) == READERS:
                    self._send(*reads.popleft(), send)
                self._turn = (self._turn + 1) % len(self._buffers)
                wait = self._arena.under_way.get(self._turn)
                if wait is not None:
                    wait()
                buffer = self._buffers[self._turn]
                self.read_bytes += target.nbytes * isinstance(file, WeightsFile)
                reads.append((target, self._turn, self._readers.submit(file.read, number, buffer)))
            while reads:
                self._send(*reads.popleft(), send)
        finally:
            for _, _, read in reads:  # no read may be under way into a buffer that is used again
                with suppress(Exception):
                    read.result()

    def _send(self, target: Tensor, turn: int, read: Future[None], send: Send) -> None:
        read.result()
        self._arena.under_way[turn] = send(target, self._buffers[turn][: target.nbytes])

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        self.worker.close()
        self._readers.shutdown()


def _blocks(to: Tensor, parts: Sequence[FilePart]) -> Iterator[tuple[Tensor, WeightsSource, int]]:
    """Yield the place in `to`, the file and the number of each block."""
    for offset, file in parts:
        whole = to[offset : offset + file.size_bytes]
        for number, target in enumerate(whole.split(BLOCK_BYTES)):
            yield target, file, number
