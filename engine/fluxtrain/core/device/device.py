"""`Device`, what the engine asks of a device, and `Transfer`, a copy under way: each wait for a
copy goes through one.

Uploads and downloads run during the computation, one queue a direction. A third queue holds uploads
that follow other copies (gradient sums that are still being downloaded), so that uploads of weights
need not wait behind them. On CUDA the queues are streams; on CPU they are threads, and the "device"
is a separate buffer in host memory, so that streaming is exercised for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from fluxtrain.core.device.disk import DiskReads, FilePart
from fluxtrain.core.device.multi_gpu_streams import Joins
from fluxtrain.core.device.recorder import Instant, Recorder, Stalls


class Transfer(Protocol):
    """A copy under way."""

    @property
    def duration_s(self) -> float | None:
        """Return the seconds that the copy took; None while they are not known."""

    def instants(self) -> tuple[Instant, Instant] | None:
        """Return when the copy began and ended, for the recorder; None until it was issued (on
        CPU: made)."""

    def done(self) -> bool:
        """Return whether the bytes have arrived."""

    def failed(self) -> bool:
        """Return whether the copy was never made, because the update it waited for failed."""

    def wait_host(self) -> None:
        """Block this thread until the bytes have arrived; raise what made the copy fail."""

    def wait_compute(self, cause: str) -> None:
        """Make the computation wait for the bytes, and book that wait as a stall of `cause`."""


def all_arrived(transfers: Iterable[Transfer]) -> bool:
    """Return whether all these transfers have arrived."""
    return all(transfer.done() for transfer in transfers)


class Device:
    """The engine's interface to a device. The defaults here are those of a single device whose
    computations end before the next begins."""

    torch_device: torch.device
    stalls: Stalls
    recorder: Recorder
    pins = False  # host memory should be page-locked
    lanes = 1  # that blocks may compute on at once; see `computing`
    _disk: DiskReads | None = None  # made when files are first read

    @property
    def disk(self) -> DiskReads:
        """Return the reader of weights from files."""
        if self._disk is None:
            self._disk = DiskReads(pin=self.pins)
        return self._disk

    @property
    def disk_read_bytes(self) -> int:
        """Return the bytes of weights that were read from files."""
        return 0 if self._disk is None else self._disk.read_bytes

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Transfer] = (), *, urgent: bool = False,
    ) -> Transfer:  # fmt: skip
        """Copy host `source` to device `to`.

        The copy starts once the update `after` is done, the point `free` of the computation has
        passed and the transfers `follows` have arrived. While it waits for `follows` it delays only
        other uploads that follow transfers. urgent: do not queue behind uploads that wait for their
        `after`.
        """
        raise NotImplementedError

    def upload_files(
        self, to: Tensor, parts: Sequence[FilePart], free: Any, follows: Sequence[Transfer],
        after: Future[None] | None = None,
    ) -> Transfer:  # fmt: skip
        """Copy files to their places in device `to` once the update `after` is done and the point
        `free` has passed; the transfer arrives when `follows` have, too. It delays no other
        upload but of files."""
        raise NotImplementedError

    def download(self, to: Tensor, source: Tensor) -> Transfer:
        """Copy device `source` to host `to` once the computation queued so far is done."""
        raise NotImplementedError

    def beside(self, work: Callable[[], None]) -> Transfer:
        """Run `work` beside the computation, behind what it has queued so far and behind earlier
        work of this kind. On a GPU it is queued on a stream, else a thread runs it."""
        raise NotImplementedError

    def read(self, point: Any, to: Tensor, source: Tensor) -> None:
        """Copy device `source`, as it is after the point, to host `to` on this thread, while the
        device computes. One thread at a time."""
        to.copy_(source)

    def for_copies(self, memory: Tensor) -> Tensor:
        """Return `memory` (on the device), registered for the copies: when it is freed, it is
        reused only after the copies that are under way have ended."""
        return memory

    def mark(self) -> Any:
        """Mark this point of the computation, for `upload(free=...)`."""
        return None

    def computing(self, *, joins: Joins = "now", lane: int = 0) -> AbstractContextManager[None]:
        """Compute inside on a stream of this device's own, where it is one of several; code outside
        waits for it. Of two lanes each computes by itself. joins: after what code outside has
        queued on this device until `now`, or until the `last` time that this was asked; or `no`."""
        return nullcontext()

    def used_here(self, tensor: Tensor) -> None:
        """Record a tensor that another lane has allocated on this lane's stream."""

    def wait_for(self, point: Any) -> None:
        """Make the computation wait for a point of this device's or another's."""

    def wait_outside(self, point: Any) -> None:
        """Make code outside of `computing` wait for a point; blocks do not."""

    def landing(self, like: Tensor, way: int = 0) -> Tensor:
        """Return memory on this device for a tensor such as `like`, which comes from another on
        one of several ways."""
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def hand_out(self, made: Tensor) -> None:
        """Keep the memory of a tensor made in `computing` until the outside code that gets it is
        done with it."""

    def land(
        self, to: Tensor, source: Tensor, after: Sequence[Any], sender: Any, way: int = 0
    ) -> Any:
        """Copy `source`, which `sender`'s computation has at the points `after`, to `to` on this
        device; return the point when it is there. Only later copies on the same way wait for it."""
        to.copy_(source)

    def keep_pace(self) -> None:
        """Wait until the computation is at most a few blocks behind this thread."""

    def tidy(self) -> None:
        """Free memory that no block needs; called between two blocks."""

    def close(self) -> None:
        """Finish the copies under way and end the threads."""
        if self._disk is not None:
            self._disk.close()
