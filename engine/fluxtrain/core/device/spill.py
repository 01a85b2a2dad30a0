"""Scratch on disk: records of optimizer states that are read ahead, updated and written back.

One file for each wrapped model, without a name: a kill leaves nothing of it, and nothing resumes
from it. Reads and writes pass by the page cache in blocks, on a few threads. Each block has an xxh3
sum in memory; one that is read wrong is read again, and then refused.

Who waits: `take` for the reads of its record; these for a free buffer, and for the record's last
write; a buffer is free once its blocks are written. Everybody else (checkpoints, moves, gradients)
reads and writes parts of records when no update of them can begin.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.device.disk import PAGE_BYTES, set_direct, sum_of
from fluxtrain.core.device.recorder import HostClock, Recorder
from fluxtrain.core.device.worker import Worker
from fluxtrain.errors import BadInput, DoesNotFit, NoSpace, ReadFailed, ScratchLost
from fluxtrain.machine.disk import read_disk
from fluxtrain.plan.depths import DISK_BLOCK_BYTES as BLOCK_BYTES
from fluxtrain.plan.depths import DISK_READERS as THREADS
from fluxtrain.plan.depths import RECORD_BUFFERS, RECORD_BYTES
from fluxtrain.units import bytes_text

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNNAMED_UNKNOWN = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_CURE = (
    "the run's checkpoints are whole: go on with --resume auto, with placement.disk_path in a "
    "folder of another disk, and have this one checked (smartctl -a)"
)


class Record:
    """A range of the file. A block that was never written reads as zeros."""

    def __init__(self, start: int, size_bytes: int) -> None:
        self.start, self.size_bytes = start, size_bytes
        self.sums: list[int | None] = [None] * -(-size_bytes // BLOCK_BYTES)
        self.kept = len(self.sums)  # blocks that an update writes back
        self.lock: AbstractContextManager[Any] = nullcontext()  # of blocks read as parts change
        self.updated: Future[None] | None = None  # the newest update that is queued, and written
        self.changed: Future[None] | None = None  # the newest one that has begun, and written

    def keep(self, size_bytes: int) -> None:
        """Let updates write back no more than the first bytes, where these are whole blocks; what
        is behind is written while others read."""
        if size_bytes % BLOCK_BYTES == 0:
            self.kept = size_bytes // BLOCK_BYTES
        else:
            self.lock = threading.Lock()

    def block(self, number: int) -> slice:
        """Return the range of a block in the record."""
        start = number * BLOCK_BYTES
        return slice(start, min(start + BLOCK_BYTES, self.size_bytes))


class Awaited:
    """A record that is read ahead for one update: to be taken, or dropped."""

    def __init__(self, record: Record, after: Future[None] | None) -> None:
        self.record, self.before, self.after = record, record.updated, after
        self.done: Future[None] = Future()  # it is dropped, or written; never fails
        self.dropped = False
        self.got: Future[tuple[Tensor, list[Future[None]]]] = Future()  # buffer and reads
        record.updated = self.done


class Spill:
    """The scratch file in a folder; it is made when something is put there."""

    def __init__(self, folder: Path, recorder: Recorder | None = None) -> None:
        self.folder, self.record_bytes = folder, RECORD_BYTES
        self._recorder = recorder or Recorder(HostClock())
        self._noted = ExitStack()  # the note of what is under way
        self.read_bytes = self.written_bytes = 0  # since the start
        self.busy_s = 0.0  # in which some read or write was under way
        self.mended = 0  # blocks that were right when they were read again
        self._file: FileIO | None = None
        self._fd = -1
        self._room_bytes = self._used_bytes = 0
        self._free_records: dict[int, list[Record]] = {}  # by their size
        self._lock = threading.Lock()
        self._at_work, self._since_s = 0, 0.0
        self._failed: BaseException | None = None
        self._closed = False
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    # -- room --------------------------------------------------------------------------------------

    def make_room(self, size_bytes: int) -> None:
        """Let the file have room for records of so many bytes together. Raises DoesNotFit, and
        BadInput for a folder that cannot be used."""
        more = self._used_bytes + size_bytes - self._room_bytes
        if more <= 0:
            return
        if self._file is None:
            self._open()
        free = read_disk(self.folder).free_bytes
        try:
            os.posix_fallocate(self._fd, self._room_bytes, more)
        except OSError as error:
            os.ftruncate(self._fd, self._room_bytes)
            if error.errno not in _FULL:
                raise self._refusal(error) from error
            raise DoesNotFit(
                f"{bytes_text(more)} of optimizer states are to live in {self.folder}, and "
                f"{bytes_text(free)} is free there ({error.strerror}): free some, or set "
                "placement.disk_path to a folder of a larger disk"
            ) from error
        self._room_bytes += more

    def make_room_for(self, sizes: Iterable[int]) -> None:
        """Reserve room for records of these sizes in bytes, using records that were given back.
        Raises as `make_room`, and reserves nothing then."""
        free = {size: len(records) for size, records in self._free_records.items()}
        lacking = Counter(sizes) - Counter(free)
        self.make_room(sum(size * count for size, count in lacking.items()))

    def mapping(self, size_bytes: int) -> mmap.mmap:
        """Return memory in another file without a name, whose pages the system may drop. Raises
        NoSpace."""
        with FileIO(_unnamed_file(self.folder), "r+") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except OSError as error:
                raise NoSpace(
                    f"{bytes_text(size_bytes)} of weights on disk are to be copied in "
                    f"{self.folder} ({error.strerror}): make room there"
                ) from error
            return mmap.mmap(file.fileno(), size_bytes)

    def record(self, size_bytes: int) -> Record:
        """Return a record of zeros. Raises as `make_room`."""
        size_bytes = in_pages(size_bytes)
        assert size_bytes <= self.record_bytes
        if free := self._free_records.get(size_bytes):
            return Record(free.pop().start, size_bytes)
        self.make_room(size_bytes)
        start, self._used_bytes = self._used_bytes, self._used_bytes + size_bytes
        return Record(start, size_bytes)

    def give_back(self, records: Sequence[Record]) -> None:
        """Let others use the room of records."""
        for record in records:
            _wait_for(record.updated)
            _wait_for(record.changed)  # an earlier one, where that is dropped
            self._free_records.setdefault(record.size_bytes, []).append(record)

    def _open(self) -> None:
        disk = read_disk(self.folder)
        if disk.in_memory:
            raise BadInput(
                f"optimizer states cannot live in {self.folder}, which is in memory itself "
                f"({disk.file_system}): set placement.disk_path to a folder on a disk"
            )
        try:
            self._file = FileIO(_unnamed_file(self.folder), "r+")  # closed with this object
        except OSError as error:
            raise self._refusal(error) from error
        self._fd = self._file.fileno()
        self.is_direct = set_direct(self._fd, writes=True)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="flux-spill-io")
        self._orders, self._stores = Worker("flux-spill"), Worker("flux-spill-store")
        size = self.record_bytes
        self._arena = HostArena(RECORD_BUFFERS * size, pin=False)  # its pages come with use
        for start in range(0, RECORD_BUFFERS * size, size):
            self._free.put(self._arena.tensor(torch.uint8, size, start))

    def _refusal(self, error: OSError) -> BadInput:
        return BadInput(
            f"optimizer states cannot live in {self.folder} ({error.strerror}): set "
            "placement.disk_path to a folder that this user can write to"
        )

    def remarks(self) -> list[str]:
        """Return what users should know of this disk."""
        if self._file is None:
            return []
        told = []
        if not self.is_direct:
            told.append(
                f"{self.folder} has no direct I/O: optimizer states pass through the system's cache"
                " on their way to the disk, which is slower and takes host memory"
            )
        if read_disk(self.folder).on_network:
            told.append(
                f"{self.folder} is mounted over the network: optimizer states cross it twice a step"
            )
        return told

    # -- the way of updates ------------------------------------------------------------------------

    def expect(self, record: Record, after: Future[None] | None = None) -> Awaited:
        """Read a record ahead, once `after` is done; records are taken or dropped in the order of
        these calls."""
        awaited = Awaited(record, after)
        self._orders.submit(partial(self._fetch, awaited))
        return awaited

    def _fetch(self, awaited: Awaited) -> None:
        if awaited.after is not None:
            wait([awaited.after])
        buffer = self._free.get()
        reads: list[Future[None]] = []
        record = awaited.record
        if awaited.before is not None:
            awaited.before.result()
        with self._lock:
            if awaited.dropped or self._closed:
                self._free.put(buffer)
                return
            for number in range(len(record.sums)):
                into = buffer[record.block(number)]
                reads.append(self._threads.submit(self._read_block, record, number, into))
            awaited.got.set_result((buffer, reads))

    @contextmanager
    def take(self, awaited: Awaited) -> Iterator[Tensor]:
        """Yield the bytes of a record (record_bytes,) uint8, to be changed in place; they are
        written after the context. An error in it leaves the states as a mixture of two steps:
        nothing reads them any more. Raises ReadFailed."""
        buffer, reads = awaited.got.result()
        try:
            wait(reads)
            for read in reads:
                read.result()
            self._refuse_failed()
            awaited.record.changed = awaited.done
            yield buffer
        except BaseException as error:
            self._failed = self._failed or error
            self._free.put(buffer)
            awaited.done.set_result(None)
            raise
        self._write_behind(awaited, buffer)

    def drop(self, awaited: Awaited) -> None:
        """Give up a record that was expected, and not taken."""
        with self._lock:
            awaited.dropped = True
        if awaited.got.done():
            buffer, reads = awaited.got.result()
            wait(reads)
            self._free.put(buffer)
        awaited.done.set_result(None)

    def _write_behind(self, awaited: Awaited, buffer: Tensor) -> None:
        record = awaited.record
        left = record.kept

        def one_less(write: Future[None]) -> None:
            nonlocal left
            error = write.exception()
            with self._lock:
                left -= 1
                is_last = left == 0
                self._failed = self._failed or error
            if is_last:
                self._free.put(buffer)
                awaited.done.set_result(None)

        for number in range(record.kept):
            source = buffer[record.block(number)]
            write = self._threads.submit(self._write_block, record, number, source)
            write.add_done_callback(one_less)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job that writes, behind earlier ones, on a thread of its own."""
        return self._stores.submit(job)

    # -- the way of everybody else -----------------------------------------------------------------

    def read(self, record: Record, start: int, into: Tensor) -> None:
        """Copy the bytes of a record from `start` on to host memory `into` (n,) uint8; an update of
        it may be queued, and must not begin meanwhile. Raises ReadFailed."""

        def one(number: int) -> None:
            page = HostArena(BLOCK_BYTES, pin=False).tensor(torch.uint8, BLOCK_BYTES, 0)
            self._read_block(record, number, page)
            mine, theirs = _overlap(record.block(number), start, into.nbytes)
            into[theirs].copy_(page[mine])

        _wait_for(record.changed)
        self._each_block(one, record, start, into.nbytes)

    def write(self, record: Record, start: int, source: Tensor) -> None:
        """Copy host memory `source` (n,) uint8 into a record, from `start` on. Raises
        ReadFailed."""

        def one(number: int) -> None:
            block = record.block(number)
            mine, theirs = _overlap(block, start, source.nbytes)
            part = source[theirs]
            if part.nbytes == block.stop - block.start and part.data_ptr() % PAGE_BYTES == 0:
                self._write_block(record, number, part)
                return
            page = HostArena(BLOCK_BYTES, pin=False).tensor(torch.uint8, BLOCK_BYTES, 0)
            if mine.stop - mine.start < block.stop - block.start:
                self._read_block(record, number, page)
            page[mine].copy_(part)
            self._write_block(record, number, page[: block.stop - block.start])

        _wait_for(record.changed)
        self._each_block(one, record, start, source.nbytes)

    def _each_block(
        self, one: Callable[[int], None], record: Record, start: int, size_bytes: int
    ) -> None:
        self._refuse_failed()
        numbers = range(start // BLOCK_BYTES, -(-(start + size_bytes) // BLOCK_BYTES))
        jobs = [self._threads.submit(one, number) for number in numbers]
        wait(jobs)
        for job in jobs:
            job.result()

    def _refuse_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    # -- blocks ------------------------------------------------------------------------------------

    def read_block(self, record: Record, number: int, into: Tensor) -> None:
        """Read a block to the beginning of `into`, once no update changes it. Raises
        ReadFailed."""
        _wait_for(record.changed)
        self._refuse_failed()
        self._read_block(record, number, into)

    def _read_block(self, record: Record, number: int, into: Tensor) -> None:
        """Read a block to the beginning of `into`, which begins at a page. Raises ReadFailed."""
        wanted, block = record.sums[number], record.block(number)
        size = block.stop - block.start
        if wanted is None:
            into[:size].zero_()
            return
        with record.lock:
            wanted = record.sums[number]
            assert wanted is not None
            trouble = self._try_read(record.start + block.start, into[:size], wanted)
        if not trouble:
            return
        if again := self._try_read(record.start + block.start, into[:size], wanted):
            raise ReadFailed(
                f"optimizer states in {self.folder}, {bytes_text(size)} at byte "
                f"{record.start + block.start:,} of the scratch file: {again}, also when they were "
                f"read again: {_CURE}"
            )
        self.mended += 1

    def _try_read(self, at: int, into: Tensor, wanted: int) -> str:
        """Read `into`; return what is wrong with it, in words."""
        view, done = into.numpy().data, 0
        try:
            with self._working():
                while done < into.nbytes and (n := os.preadv(self._fd, [view[done:]], at + done)):
                    done += n
            if not self.is_direct:
                os.posix_fadvise(self._fd, at, done, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            return error.strerror or str(error)
        self._count(read=done)
        return "" if sum_of(into) == wanted else "they are not the bytes that were written"

    def _write_block(self, record: Record, number: int, source: Tensor) -> None:
        """Write a block, in a second attempt too. Raises ScratchLost, else ReadFailed."""
        at, view = record.start + record.block(number).start, source.numpy().data
        with record.lock:
            record.sums[number] = sum_of(source)
            self._try_write(at, view, source)
        self._count(written=source.nbytes)

    def _try_write(self, at: int, view: memoryview, source: Tensor) -> None:
        for is_last in (False, True):
            done = 0
            try:
                with self._working():
                    while done < source.nbytes:
                        done += os.pwritev(self._fd, [view[done:]], at + done)
                break
            except OSError as error:
                if is_last or error.errno in _FULL:
                    kind = ScratchLost if error.errno in _FULL else ReadFailed
                    raise kind(
                        f"{bytes_text(source.nbytes)} of optimizer states cannot be written to "
                        f"{self.folder} ({error.strerror}): {_CURE}"
                    ) from error

    def _count(self, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the seconds in which some read or write is under way."""
        with self._lock:
            if not self._at_work:
                self._since_s = time.perf_counter()
                self._noted.enter_context(self._recorder.working("disk", "spilled", ""))
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                if not self._at_work:
                    self.busy_s += time.perf_counter() - self._since_s
                    self._noted.close()

    def close(self) -> None:
        """End the threads, and let the file go."""
        if self._file is None:
            return
        self._closed = True
        self._free.put(torch.empty(0, dtype=torch.uint8))  # for a read of what nobody takes
        self._stores.close()
        self._orders.close()
        self._threads.shutdown()
        self._file.close()
        self._file = None


def _wait_for(update: Future[None] | None) -> None:
    if update is not None:
        update.result()


def in_pages(size_bytes: int) -> int:
    """Round up to whole pages, as reads and writes past the page cache are."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def block_elements(itemsize: int) -> int:
    """Return how many elements fill a block."""
    return BLOCK_BYTES // itemsize


def apart(offset: int, size_bytes: int) -> int:
    """Return where a part of a record begins at `offset` or behind it: at a block of its own if
    there are `size_bytes` of a block or more to keep apart."""
    return -(-offset // BLOCK_BYTES) * BLOCK_BYTES if size_bytes >= BLOCK_BYTES else offset


def _overlap(block: slice, start: int, size_bytes: int) -> tuple[slice, slice]:
    """Return where the range of a record that begins at `start` lies in a block, and the same bytes
    counted from `start`."""
    first, stop = max(block.start, start), min(block.stop, start + size_bytes)
    return slice(first - block.start, stop - block.start), slice(first - start, stop - start)


def _unnamed_file(folder: Path) -> int:
    """Open a new file that has no name. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _UNNAMED_UNKNOWN:
            raise
    file, name = tempfile.mkstemp(prefix=".states-", dir=folder)
    os.unlink(name)
    return file
