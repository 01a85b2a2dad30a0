"""`HostSums`: gradients of a machine's ranks are added on the host (`parallel.gradients`).

Each rank downloads its own sum of a group, in fp32, to a buffer that all of them see. When all sums
are there, each rank adds the parts that it is home to, in the order of ranks, and rounds them once.
The squares of their norms are added over ranks, too. A rank uses its buffers in turn. Groups of
blocks alone are added so: embeddings and heads send rows and parts, and would need large buffers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena, aligned
from fluxtrain.core.device.cpu_device import CpuTransfer
from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.device.worker import Worker
from fluxtrain.core.gradients.host_gradients import Arrival, HostGradients
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Segment
from fluxtrain.core.ranks.exchange import add_in_order
from fluxtrain.core.ranks.shared_memory import SharedMemory
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.events.trace.lanes import OTHER_RANKS
from fluxtrain.plan.depths import HOST_SUM_BUFFERS as BUFFERS
from fluxtrain.plan.states import STATE_BLOCK

_ROW_ELEMENTS = 1 << 12  # whose squares are added in fp32, those of rows in fp64
_SENT, _ADDED = 1, 2  # counters of the shared memory


class HostSums:
    """The buffers of all ranks; used by the thread of the backward pass, which waits for a buffer
    where the host is slower than the computation."""

    def __init__(
        self, groups: Sequence[Group], memory: SharedMemory, device: Device, factor: float
    ) -> None:
        """Make room for sums of these groups; all ranks do so at once. factor: of each sum."""
        self._memory, self._factor, self._rank = memory, factor, memory.mates.rank
        self._stalls = device.stalls
        elements = max(group.trained_elements for group in groups)
        members = max(len(group.members) for group in groups)
        room, of_norms = aligned(4 * elements), aligned(8 * members)
        each = BUFFERS * (room + of_norms)
        size_bytes, starts = memory.mates.world * each, range(memory.mates.world)
        arena = HostArena(size_bytes, pin=False, shared=memory.take(size_bytes))
        self._sums = [
            [arena.tensor(torch.float32, elements, rank * each + n * room) for n in range(BUFFERS)]
            for rank in starts
        ]
        self._squares = [
            arena.tensor(
                torch.float64, BUFFERS * members, (rank + 1) * each - BUFFERS * of_norms
            ).view(BUFFERS, members)
            for rank in starts
        ]
        if device.pins:
            arena.lock_parts(self._sums[self._rank])
        self._arena = arena
        self._worker = Worker("flux-host-sums")
        self._jobs: list[Future[tuple[float, float]] | None] = [None] * BUFFERS
        self._number = 0  # of sums so far, of every rank the same

    @staticmethod
    def takes(group: Group) -> bool:
        """Return whether ranks add up this group's gradients on the host."""
        return group.kind == "block" and bool(group.trained) and group.shares is not None

    def begin(
        self, group: Group, flat: Tensor, host: HostGradients, again: set[Segment]
    ) -> tuple[Transfer, Arrival]:
        """Begin to add up `flat` (trained_elements,) fp32 of every rank, into the group's
        gradients; fp32 for the segments `again`. Return the download of `flat`, and the rest."""
        shares, slot = group.shares, self._number % BUFFERS
        assert shares is not None
        before, self._number = self._jobs[slot], self._number + 1
        if before is not None:
            CpuTransfer(before, self._stalls).wait_compute(OTHER_RANKS)
        for segment in group.trained:
            segment.is_wide = False
            if segment in again:
                group.memory.take_wide_gradient(segment)
            host.scatter.forget(segment.gradient)
        sent = host.staging.download_directly(
            group, self._sums[self._rank][slot][: len(flat)], flat
        )
        members = [member for segment in group.trained for member in segment.members]
        norms = torch.empty(len(members), dtype=torch.float32)
        parts = [(segment, segment.gradient) for segment in group.trained]
        add = partial(self._add, self._number, slot, sent, parts, shares, norms)
        job = self._jobs[slot] = self._worker.submit(add)
        places = {member.index: place for place, member in enumerate(members)}
        arrival = Arrival([CpuTransfer(job, self._stalls)], norms, places, norms_are_late=True)
        return sent, arrival

    def _add(
        self,
        number: int,
        slot: int,
        sent: Transfer,
        parts: list[tuple[Segment, Tensor]],
        shares: Shares,
        norms: Tensor,
    ) -> tuple[float, float]:
        sent.wait_host()
        self._memory.post(_SENT, number)
        self._memory.wait(_SENT, number)
        started_s, base, place = time.perf_counter(), 0, 0
        squares = self._squares[self._rank][slot]
        for segment, to in parts:
            sums = [
                (start, self._added(slot, base + start, base + stop))
                for start, stop in shares.own(segment.elements)
            ]
            for start, total in sums:
                rounded = to[start : start + len(total)].copy_(total)
                if to.dtype == torch.float16:  # whose overflows are told by norms alone
                    total.copy_(rounded)
            first, last = shares.apart(segment.elements)
            for member in segment.members:
                begins, ends = max(first, member.offset), min(last, member.offset + member.count)
                squares[place] = sum(
                    _sum_of_squares(total[max(0, begins - start) : max(0, ends - start)])
                    for start, total in sums
                )
                place += 1
            base += segment.elements
        self._memory.post(_ADDED, number)
        self._memory.wait(_ADDED, number)
        together = torch.stack([of_rank[slot, :place] for of_rank in self._squares])
        norms.copy_(together.sum(0).sqrt())
        return started_s, time.perf_counter()

    def _added(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the sum of these elements of all ranks, added in their order, which stands in the
        first one's buffer. A short range has memory of its own: it may be the end of a tensor,
        which others read too."""
        parts = [buffers[slot][start:stop] for buffers in self._sums]
        if stop - start < len(parts) * STATE_BLOCK:
            parts[0] = parts[0].clone()
        total = add_in_order(parts)
        return total if self._factor == 1.0 else total.mul_(self._factor)

    def close(self) -> None:
        """End the thread."""
        self._worker.close()


def _sum_of_squares(values: Tensor) -> float:
    """Return the sum of the squares of values (n,) fp32. torch's norm of all of them at once is off
    by 0.2 % at 38 M values on processors."""
    rows = len(values) // _ROW_ELEMENTS
    whole, rest = values.tensor_split([rows * _ROW_ELEMENTS])
    of_rows = torch.linalg.vector_norm(whole.view(rows, _ROW_ELEMENTS), dim=1)
    return float(of_rows.double().square().sum() + rest.double().square().sum())
