"""One GPU among several of a process: its own compute stream, and chunks that come and go.

torch's copy between two GPUs makes the current stream of each wait for the other's, so that the two
compute in a row. Here chunks leave and land on streams of their own, blocks compute on a stream of
their own, and only events order them. Code outside of blocks runs on torch's current stream, which
waits for every block on its GPU and which no block on another GPU waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from fluxtrain.core.device.page_locks import host_empty

Joins = Literal["now", "last", "no"]  # as in `Device.computing`
LANES = 2  # compute streams of a GPU, which neighbouring blocks have in turn: as the plan counts
WAYS = 4  # to a GPU and from it, in each of which copies keep their order
MOST_BEHIND = 3  # units that a GPU may be behind the host, whose memory is not free yet
_CHECKED_BYTES = 1 << 22
_PART_BYTES = 4 << 20  # of a copy through the host: 80 us at 50 GB/s
_MOST_PARTS = 8
_peers: dict[tuple[int, int], bool] = {}  # whether copies between two GPUs arrive as they left


class MultiGpuStreams:
    """The streams of a GPU that computes together with other GPUs."""

    def __init__(
        self, torch_device: torch.device, current: Callable[[], torch.cuda.Stream]
    ) -> None:
        self.torch_device = torch_device
        self._outside = current  # the stream of the code around blocks
        # by lane, all of them now: memory that is handed out is kept for each
        self._computes = [torch.cuda.Stream(torch_device) for _ in range(LANES)]
        # where the code around was when it was last waited for
        self._joined: torch.cuda.Event | None = None
        self.leaving = [torch.cuda.Stream(torch_device) for _ in range(WAYS)]
        self.landed_on = [torch.cuda.Stream(torch_device) for _ in range(WAYS)]
        self._behind: deque[torch.cuda.Event] = deque()

    @contextmanager
    def computing(self, *, joins: Joins, lane: int) -> Iterator[None]:
        """Queue the context's operations on the compute stream of a lane; the surrounding stream
        waits for it afterwards."""
        outside = self._outside()
        if outside in self._computes:
            yield
            return
        compute = self._computes[lane]
        if joins == "now":
            self._joined = outside.record_event()
        if joins != "no" and self._joined is not None:
            compute.wait_event(self._joined)
        try:
            with torch.cuda.stream(compute):
                yield
        finally:
            outside.wait_stream(compute)

    def landing(self, like: Tensor, way: int) -> Tensor:
        """Return memory like `like`, which copies on a landing stream fill and blocks read."""
        with torch.cuda.stream(self.landed_on[way % WAYS]):
            made = torch.empty(like.shape, dtype=like.dtype, device=self.torch_device)
        self.hand_out(made)
        return made

    def hand_out(self, made: Tensor) -> None:
        """Record a tensor on every stream that may read it: torch's allocator then keeps its
        memory until they are past the operations queued now."""
        for stream in (*self._computes, self._outside()):
            made.record_stream(stream)

    def land(
        self,
        to: Tensor,
        source: Tensor,
        after: Sequence[torch.cuda.Event],
        sender: MultiGpuStreams,
        way: int,
    ) -> torch.cuda.Event:
        """Copy `source` from `sender` to `to` here; return the event of its arrival."""
        landed_on, leaving = self.landed_on[way % WAYS], sender.leaving[way % WAYS]
        source.record_stream(leaving)
        for event in after:
            leaving.wait_event(event)
        if reaches(sender.torch_device, self.torch_device):
            # torch queues the copy on the sender's current stream, between two waits of this one's
            with torch.cuda.stream(landed_on), torch.cuda.stream(leaving):
                to.copy_(source, non_blocking=True)
        else:
            host = host_empty(tuple(source.shape), source.dtype, pin=True)
            for part in parts_of(source):  # one goes up while the next comes down
                with torch.cuda.stream(leaving):
                    host[part].copy_(source[part], non_blocking=True)
                landed_on.wait_event(leaving.record_event())
                with torch.cuda.stream(landed_on):
                    to[part].copy_(host[part], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(landed_on)
        return arrived

    def keep_pace(self, point: torch.cuda.Event) -> None:
        """Wait until the device is only some units behind, so that memory held by
        copies is freed."""
        self._behind.append(point)
        if len(self._behind) > MOST_BEHIND:
            self._behind.popleft().synchronize()


def parts_of(tensor: Tensor) -> list[slice | EllipsisType]:
    """Cut a tensor into ranges of rows of at least `_PART_BYTES`, `_MOST_PARTS` at most; a tensor
    without rows stays whole."""
    rows = tensor.shape[0] if tensor.dim() else 0
    count = min(_MOST_PARTS, rows, tensor.nbytes // _PART_BYTES)
    if count < 2:
        return [...]
    bounds = [rows * at // count for at in range(count + 1)]
    return [slice(first, stop) for first, stop in pairwise(bounds)]


def reaches(sender: torch.device, receiver: torch.device) -> bool:
    """Return whether one GPU can copy directly to another. Tried once, and the bytes compared:
    some systems (IOMMU, access control) corrupt such copies without an error."""
    pair = (sender.index, receiver.index)
    if pair not in _peers:
        _peers[pair] = _copies_arrive(sender, receiver)
    return _peers[pair]


def _copies_arrive(sender: torch.device, receiver: torch.device) -> bool:
    if not torch.cuda.can_device_access_peer(receiver.index, sender.index):
        return False
    # not what the training draws from, nor what an earlier pair left in the receiver's memory
    drawn = torch.Generator().manual_seed(1 + 1024 * sender.index + receiver.index)
    made = torch.randint(0, 256, (_CHECKED_BYTES,), dtype=torch.uint8, generator=drawn)
    for device in (sender, receiver):
        torch.cuda.synchronize(device)
    there = made.to(sender)
    back = there.to(receiver).cpu()
    return bool(torch.equal(made, back))
