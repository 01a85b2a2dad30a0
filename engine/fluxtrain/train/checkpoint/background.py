"""Write one checkpoint on threads while training goes on, from copies made group by group.

The thread `checkpoint-copy` copies the groups in the order in which the next step updates them, and
each group's update waits for its copy (`GroupJobs.saving`), on the host or on a device; forward and
backward only read, and wait for nothing. The thread `checkpoint` writes the copies. They hold at
most a budget of host memory: beyond it copying waits for writing. Where optimizer states live on
disk there is no memory for copies of groups on the disk or the host: these are written from where
they live, and the update of each waits until it is written. So what is written is the state
of one moment, bit for bit.

The kernel makes pages when they are first written, a gigabyte a second or less, and a copy into
fresh memory would hold the training up for that long. So pages are made before the first checkpoint
is due, slowly, and stay for the next ones, until little memory is left.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena, aligned
from fluxtrain.core.device.heap import note_spare
from fluxtrain.core.optimizer.state_shards import Held, Read
from fluxtrain.train.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine as Engine


PIECE_BYTES = 16 << 20
_BETWEEN_BYTES = 16 << 20  # of all tensors, which begin at aligned addresses
SHARE = 0.2  # of a thread's time goes into making pages


class CopyMemory:
    """One mapping that is filled from its beginning by each checkpoint; used by one at a time."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate `size_bytes`, which hold the tensors of one checkpoint."""
        try:
            self._arena = HostArena(size_bytes + _BETWEEN_BYTES, pin=False)
        except (OSError, MemoryError):  # a limit of addresses: each copy has fresh memory
            self._arena = HostArena(0, pin=False)
        self._used_bytes = 0
        self._in_use = False
        self._lock = threading.Lock()
        self._stops = threading.Event()
        self._maker: threading.Thread | None = None
        self.made_bytes = 0  # of pages ahead
        note_spare(self)

    def make_ahead(self) -> None:
        """Begin to make the pages, on a thread; once."""
        if self._maker is None and not self._stops.is_set():
            maker = threading.Thread(target=self._make, name="copy-memory", daemon=True)
            try:
                maker.start()
            except RuntimeError:  # a limit of threads: the pages are made as they are written
                self._stops.set()
            else:
                self._maker = maker

    def begin(self) -> None:
        """Use the memory from its beginning again: nothing reads its content."""
        self._stops.set()
        if self._maker is not None:
            self._maker.join()
        with self._lock:
            self._in_use, self._used_bytes = True, 0

    def end(self) -> None:
        """Note that nothing reads the copies any more."""
        with self._lock:
            self._in_use = False

    def give_back(self) -> None:
        """Free the pages, unless copies are in them; later copies make new pages as they write."""
        self._stops.set()
        with self._lock:
            if not self._in_use:
                self._arena.forget()

    def like(self, tensor: Tensor) -> Tensor:
        """Return memory for a contiguous copy of a tensor in its shape; fresh memory once this is
        full."""
        size_bytes = aligned(tensor.nbytes)
        with self._lock:
            at = self._used_bytes
            if not tensor.nbytes or at + size_bytes > self._arena.size_bytes:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
            self._used_bytes += size_bytes
        return self._arena.tensor(tensor.dtype, tensor.numel(), at).view(tensor.shape)

    def close(self) -> None:
        """End the thread."""
        self._stops.set()

    def _make(self) -> None:
        size_bytes = self._arena.size_bytes
        for at in range(0, size_bytes, PIECE_BYTES):
            started_s = time.monotonic()
            count = min(PIECE_BYTES, size_bytes - at)
            ctypes.memset(self._arena.address + at, 0, count)  # without holding the GIL
            self.made_bytes += count
            took_s = time.monotonic() - started_s
            if self._stops.wait(took_s * (1 / SHARE - 1)):
                return


Shard = tuple[str, "dict[str, Tensor]"]
Write = Callable[[Iterator[Shard], Callable[["dict[str, Tensor]"], None]], Checkpoint]


class BackgroundWrite:
    """A checkpoint on its way to the disk. Made and asked by the run's thread."""

    def __init__(
        self,
        engine: Engine,
        step: int,
        write: Write,
        budget_bytes: int,
        memory: CopyMemory | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        """Take the state between two steps: all updates are done.

        `write` writes the given shards, and reports each. The copies go into `memory`, or fresh
        memory. Parameters outside of groups, for which no update waits, are copied at once.
        in_place: copy no group that is off the devices.
        """
        self.step = step
        self.checkpoint: Checkpoint | None = None
        self.error: BaseException | None = None
        self._write, self._budget_bytes = write, budget_bytes
        self._held_bytes, self._given_up = 0, False
        self._room = threading.Condition()
        self._copies: SimpleQueue[Shard | BaseException] = SimpleQueue()
        self._engine, self._held_before_s = engine, engine.held_s
        self._memory = memory
        if memory is not None:
            memory.begin()
        self._parts: list[tuple[Shard, Held | None]] = []
        self._in_place, self._uncopied = in_place, dict[int, Future[None]]()  # by id of a shard
        self._copier = threading.Thread(target=self._copy, name="checkpoint-copy")
        self._writer = threading.Thread(target=self._written, name="checkpoint")
        try:
            for name, tensors in engine.state_shards():
                held = engine.hold_for_saving(name)
                shard = (name, tensors if held is not None else _copied(tensors, memory))
                self._parts.append((shard, held))
            if engine.plan.optimizer_in_backward:  # as the next step updates them
                self._parts.reverse()
            self._count = len(self._parts)
            self._copier.start()
            self._writer.start()
        except BaseException:  # no memory, no thread: training goes on without
            self._give_up()
            raise

    @property
    def done(self) -> bool:
        """Return whether the checkpoint is whole on disk, or has failed."""
        return not self._writer.is_alive()

    @property
    def held_s(self) -> float:
        """Return the seconds that updates have waited for its copies."""
        return self._engine.held_s - self._held_before_s

    def wait_copied(self) -> None:
        """Wait until nothing reads the engine's memory any more."""
        self._copier.join()
        for written in list(self._uncopied.values()):
            written.result()

    def wait(self) -> None:
        """Wait until it is done."""
        self._copier.join()
        self._writer.join()

    def _give_up(self) -> None:
        """Let the updates continue, and end the copies."""
        with self._room:
            self._given_up = True
            self._room.notify_all()
        if self._copier.ident is not None:
            self._copier.join()
        self._release()
        for _, held in self._parts:
            if held is not None and not held.copied.done():
                held.copied.set_result(None)
        if self._memory is not None:
            self._memory.end()

    def _copy(self) -> None:
        for (name, tensors), held in self._parts:
            copies: Shard | BaseException = (name, tensors)
            if self._in_place and held is not None and not held.on_device:
                self._uncopied[id(tensors)] = held.copied
                self._copies.put(copies)
                continue
            try:
                self._wait_for_room(_bytes(tensors))
                if held is not None and not self._given_up:
                    copies = (name, _copied(tensors, self._memory, held.read))
            except BaseException as error:  # noqa: BLE001 - raised by the thread that writes
                copies = error
            finally:  # whatever happened, training goes on
                if held is not None:
                    held.copied.set_result(None)
            self._copies.put(copies)
        self._parts = []

    def _wait_for_room(self, size_bytes: int) -> None:
        """Wait for writing, unless no copy is held; count the copy as held."""
        with self._room:
            while (
                self._held_bytes
                and self._held_bytes + size_bytes > self._budget_bytes
                and not self._given_up
            ):
                self._room.wait()
            self._held_bytes += size_bytes

    def _written(self) -> None:
        try:
            self.checkpoint = self._write(self._shards(), self._forget)
        except BaseException as error:  # noqa: BLE001 - raised between two steps
            self.error = error
        finally:
            with self._room:
                self._given_up = True
                self._room.notify_all()
            self._copier.join()
            self._release()
            if self._memory is not None:
                self._memory.end()

    def _release(self) -> None:
        """Let updates continue that wait for the writing of groups that it did not reach."""
        while self._uncopied:
            self._uncopied.popitem()[1].set_result(None)

    def _shards(self) -> Iterator[Shard]:
        for _ in range(self._count):
            copies = self._copies.get()
            if isinstance(copies, BaseException):
                raise copies
            yield copies
            del copies  # or its memory would stay while the next is waited for

    def _forget(self, written: dict[str, Tensor]) -> None:
        if (uncopied := self._uncopied.pop(id(written), None)) is not None:
            uncopied.set_result(None)
            return
        with self._room:
            self._held_bytes -= _bytes(written)
            self._room.notify_all()


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _copied(
    tensors: dict[str, Tensor], memory: CopyMemory | None, read: Read = Tensor.copy_
) -> dict[str, Tensor]:
    """Copy tensors to host memory that nothing else writes to."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        source = tensor.detach()
        copy = (
            torch.empty(source.shape, dtype=source.dtype) if memory is None else memory.like(source)
        )
        (Tensor.copy_ if source.device.type == "cpu" else read)(copy, source)
        found[name] = copy
    return found
