"""Gradients on the host and on their way there, the memory that they pass through, and what further
backward passes add to them.

A second backward pass before the optimizer step is added in fp32 (bf16 sums are off by 0.35 % at 8
terms, 3 % at 512), on the device: the host's gradient is uploaded while the group's backward is
computed, the new one is added, and the sum is downloaded in fp32. The host computes nothing and
waits for nothing, and norms are taken on the device as after a first pass. Both directions use the
staging buffers of rounded gradients: of bf16 gradients two are as large as a segment's sum.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device.arena import device_flat
from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.gradients.row_sum import RowSum, RowTransfer, Scatter
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member, Segment
from fluxtrain.core.ranks.exchange import NOT_EXCHANGED, Exchange
from fluxtrain.errors import MisusedModel
from fluxtrain.events.trace.lanes import OTHER_RANKS
from fluxtrain.plan.depths import ring_depth, staging_depth, sum_depth

Report = Callable[[Group, Transfer, int], None]  # group, the copy, bytes
Shape = tuple[tuple[object, int], ...]


@dataclass(eq=False)
class Arrival:
    """A group's gradients, on the host or being downloaded, and their norms on the device."""

    transfers: list[Transfer]
    norms: Tensor | None  # (members with a gradient,) fp32 on the device; None: measure the stored
    norm_of: dict[int, int]  # member index -> position in norms
    norms_are_late: bool = False  # they are on the host, and come with the gradients
    rows: RowSum | None = None  # stay on the device for further passes: the host's are not in place

    def is_of(self, members: list[Member]) -> bool:
        """Return whether `norms` belong to exactly these members."""
        known = 0 if self.norms is None else self.norms.numel()
        return known == len(members) and self.norm_of.keys() == {m.index for m in members}

    def measured(self) -> Tensor | None:
        """Return the norms; waits for late ones."""
        for transfer in self.transfers if self.norms_are_late else ():
            transfer.wait_compute(OTHER_RANKS)
        return self.norms

    def wait(self) -> None:
        """Block until the gradients are on the host."""
        for transfer in self.transfers:
            transfer.wait_host()

    @staticmethod
    def of(transfers: list[Transfer], norms: list[Tensor], members: list[Member]) -> Arrival:
        """Store `norms` of the members in their order, in one or more tensors."""
        together = norms[0] if len(norms) == 1 else torch.cat(norms)
        return Arrival(transfers, together, {m.index: place for place, m in enumerate(members)})


@dataclass(eq=False)
class _Prefetched:
    """A range of a segment's gradient on the host, being uploaded."""

    staged: Tensor  # (elements of the range,) on the device
    transfer: Transfer


class HostGradients:
    """All groups' gradients on the host; used by the thread that runs the backward pass.

    Each copy is reported to `downloaded` or `uploaded`.
    """

    def __init__(
        self,
        device: Device,
        downloaded: Report,
        uploaded: Report,
        arrivals: dict[Group, Arrival] | None = None,
        exchange: Exchange = NOT_EXCHANGED,
    ) -> None:
        self.device = device
        self.exchange = exchange  # with other processes, before gradients are rounded
        self.arrivals = {} if arrivals is None else arrivals
        self.staging = GradientStaging(device, downloaded, uploaded)
        self.scatter = Scatter()
        self._ring = GradientRing()
        self._prefetched: dict[tuple[Segment, int], _Prefetched] = {}  # by first element
        self._exchanged: dict[Group, int] = {}  # the backward pass that did, by torch's number
        # downloads of dropped gradients, to memory that is used again
        self._dropped: dict[Group, list[Transfer]] = {}

    @property
    def device_bytes(self) -> int:
        """Return the device memory of staging, and of rows that stay for further passes."""
        rows = [a.rows for a in list(self.arrivals.values())]  # other threads ask
        return self.staging.device_bytes + sum(r.values.nbytes for r in rows if r is not None)

    def exchanges(self, group: Group) -> bool:
        """Return whether other processes add to the group's sum, which is complete now.

        Raises MisusedModel: they did so in this backward pass already, and would count it again.
        """
        if not self.exchange.finishes():
            return False
        number = torch._C._current_graph_task_id()
        if self.exchange.sums and self._exchanged.get(group, -1) == number >= 0:
            raise MisusedModel(
                f"{group.name} is used more than once in a forward pass, and fluxtrain train adds "
                "the gradients of such a block up in one process only: set parallel.processes=1, "
                "or start it without torchrun"
            )
        self._exchanged[group] = number
        return True

    # -- memory ------------------------------------------------------------------------------------

    def wait_for_update(self, group: Group) -> None:
        """Wait for the update of the step before, whose moments still read the group's gradients.
        Only this thread waits: the group's backward is queued and keeps a GPU busy."""
        waits, started_s = group.jobs.under_way, time.perf_counter()
        group.jobs.wait()
        if waits:
            self.device.stalls.add_host("moments", time.perf_counter() - started_s)

    def allocate(self, group: Group, *, passing: bool) -> None:
        """Allocate memory for the group's gradients; passing: only until its update, which follows
        at once. Gradients on disk have it until they are written there. Waits for an earlier
        group when all of that memory is lent."""
        group.homes.use("gradients")
        to_disk = group.is_on("disk", "gradients")
        if to_disk or (passing and not group.is_on("device", "gradients")):
            self._ring.lend(group)
        else:
            self.keep_memory(group)

    def store_on_disk(self, group: Group) -> None:
        """Begin to write gradients that live on disk, once they have arrived; the update waits."""
        if not group.is_on("disk", "gradients"):
            return
        transfers, segments = self.arrivals[group].transfers, group.trained
        homes = [(s.on_disk, s.gradient_on_disk, s.gradient) for s in segments]

        def store() -> None:
            for transfer in transfers:
                transfer.wait_host()
            for _, there, flat in homes:
                assert there is not None
                there.copy_(flat)

        states = homes[0][0]
        assert states is not None, "gradients on disk are in the records of the states"
        group.jobs.storing = states.spill.submit(store)

    def keep_memory(self, group: Group) -> None:
        """Give the group's gradients their own memory from now on."""
        self._ring.keep(group)
        group.memory.ensure_gradient()

    def give_ring_back(self, groups: Iterable[Group]) -> None:
        """Free the ring of buffers of updates in backward, between two steps."""
        self._ring.give_back(groups)

    # -- what arrives ------------------------------------------------------------------------------

    def wait(self, group: Group) -> None:
        """Block until the group's gradients are on the host and every other copy to their memory
        has ended."""
        for transfer in self._dropped.pop(group, ()):
            transfer.wait_host()
        arrival = self.arrivals.get(group)
        if arrival is not None:
            arrival.wait()

    def drain(self) -> None:
        """Wait for all downloads, also of gradients that were dropped."""
        self.staging.drain()

    def transfers_of(self, group: Group) -> list[Transfer]:
        """Return the downloads of the group's gradients."""
        arrival = self.arrivals.get(group)
        return [] if arrival is None else arrival.transfers

    def transfers_in_place(self, group: Group) -> list[Transfer]:
        """Return the downloads of the group's gradients that end where the gradients are stored.
        Waits for rows, which the host must put in their places."""
        transfers = self.transfers_of(group)
        if any(isinstance(transfer, RowTransfer) for transfer in transfers):
            self.wait(group)
            return []
        return transfers

    def forget(self, group: Group) -> None:
        """Drop the group's gradients."""
        self.take_rows(group)
        arrival = self.arrivals.pop(group, None)
        if arrival is not None:  # rows are put in their places only by a thread that waits
            self._dropped[group] = [t for t in arrival.transfers if not isinstance(t, RowTransfer)]
        for member in group.members:
            member.has_gradient = False
            member.gradient_scale = 1.0
        for segment in group.trained:
            segment.is_wide = False

    def drop(self, group: Group, member: Member) -> None:
        """Drop the gradient of one member."""
        member.has_gradient = False
        member.gradient_scale = 1.0
        if not group.has_gradient:
            self.forget(group)

    def take_rows(self, group: Group) -> RowSum | None:
        """Return the rows kept on the device for a further pass, and forget them: the gradient is
        about to change."""
        arrival = self.arrivals.get(group)
        if arrival is None:
            return None
        rows, arrival.rows = arrival.rows, None
        return rows

    def handed_out(self, member: Member) -> None:
        """Note that code outside the engine has the memory of the member's gradient."""
        self.scatter.handed_out(member.segment.gradient)

    # -- rows of an embedding ----------------------------------------------------------------------

    def download_rows(
        self, group: Group, values: Tensor, put: Callable[[Tensor], object]
    ) -> RowTransfer:
        """Download rows (U, H); the first thread that waits for them calls `put` with them."""
        buffers = group.rows
        assert buffers is not None
        landing, arena = buffers.landing(values)
        transfer: Transfer
        if values.dtype == buffers.dtype and len(values) <= buffers.capacity:
            size_bytes = buffers.capacity * buffers.row_bytes
            transfer, _ = self.staging.download(group, landing, values, size_bytes)
        else:  # a sum of several batches, which no code writes to
            transfer = self.staging.download_directly(group, landing, values)
        buffers.arrives(transfer)

        def land() -> None:
            assert arena.size_bytes >= landing.nbytes  # and is held until here
            put(landing)

        return RowTransfer(transfer, land)

    def clear_ahead(self, segment: Segment) -> None:
        """Zero the segment's gradient while rows are downloaded that will be put into it."""
        self.scatter.clear_ahead(segment.gradient, self._dropped.values())

    def add_rows(self, group: Group, rows: RowSum) -> None:
        """Add rows to the stored gradient on the host, in fp32; waits for the device."""
        self.wait(group)
        member = group.members[0]
        apply_scales([member])
        group.memory.widen_gradient(member.segment)
        fresh = rows.values.to(device="cpu", dtype=torch.float32)
        member.gradient.index_add_(0, rows.places.rows, fresh)
        self.arrivals[group] = Arrival([], None, {})

    # -- further backward passes -------------------------------------------------------------------

    def prefetch(self, group: Group) -> None:
        """Prefetch the host's accumulated gradient before this group's backward, as much of it as
        there are buffers for."""
        taken: Counter[int] = Counter()
        if group.is_on("disk", "gradients") and any(m.has_gradient for m in group.members):
            raise MisusedModel(
                f"gradients of {group.name} live on disk, which takes one backward pass a step: "
                "use one batch a step, or plan the accumulation (placement's passes)"
            )
        for segment in group.trained if not group.is_on("device", "gradients") else ():
            size = segment.size_bytes
            if not any(member.has_gradient for member in segment.members):
                continue
            for first, stop in _ranges(segment, segment.gradient.dtype):
                if taken[size] == _depth(group, segment):
                    break
                taken[size] += 1
                buffer, busy = self.staging.next(size, _depth(group, segment))
                follows = [*([] if busy is None else [busy]), *self.transfers_of(group)]
                self._prefetched[segment, first] = self._upload(
                    group, segment, first, stop, buffer, follows
                )

    def add_stored(
        self, group: Group, segment: Segment, flat: Tensor, follows: Sequence[Transfer]
    ) -> None:
        """Add the host's gradient of the segment to `flat` (elements,) fp32 on the device, which is
        zero where there is no new gradient. `follows` are downloads of the host's gradient."""
        for first, stop in _ranges(segment, segment.gradient.dtype):
            found = self._prefetched.pop((segment, first), None)
            if found is None or not self.staging.holds(segment.size_bytes, found.transfer):
                buffer = self.staging.free(segment.size_bytes, _depth(group, segment))
                found = self._upload(group, segment, first, stop, buffer, follows)
            found.transfer.wait_compute("gradients")
            _scale(found.staged, segment.members, first)
            flat[first:stop].add_(found.staged)
            self.staging.read_until_now(segment.size_bytes, found.staged)
        for member in segment.members:
            member.gradient_scale = 1.0

    def download_sum(
        self, group: Group, segment: Segment, flat: Tensor, spans: Sequence[tuple[int, int]]
    ) -> list[Transfer]:
        """Download these ranges of the sum `flat` (elements,) fp32 as it is; it is this step's
        gradient."""
        group.memory.take_wide_gradient(segment)
        transfers: list[Transfer] = []
        size_bytes, depth = segment.size_bytes, _depth(group, segment)
        for first, stop in _ranges(segment, torch.float32):
            for start, end in ((max(first, a), min(stop, b)) for a, b in spans):
                if start < end:
                    to, part = segment.gradient[start:end], flat[start:end]
                    transfer, _ = self.staging.download(group, to, part, size_bytes, depth)
                    transfers.append(transfer)
        return transfers

    def discard_prefetched(self) -> None:
        """Drop prefetched sums of a backward pass that raised."""
        self._prefetched.clear()

    def _upload(
        self, group: Group, segment: Segment, first: int, stop: int, buffer: Tensor,
        follows: Sequence[Transfer],
    ) -> _Prefetched:  # fmt: skip
        host = segment.gradient[first:stop]
        staged = cut(buffer, host.dtype, stop - first)
        transfer = self.staging.upload(group, staged, host, segment.size_bytes, follows)
        return _Prefetched(staged, transfer)


def _depth(group: Group, segment: Segment) -> int:
    """Return how many buffers the segment's sum passes through."""
    return sum_depth(segment.size_bytes, is_block=group.kind == "block")


def _ranges(segment: Segment, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yield the first and last element of each range that fits into a buffer of the segment's size
    in `dtype`."""
    most = segment.size_bytes // dtype.itemsize
    for first in range(0, segment.elements, most):
        yield first, min(segment.elements, first + most)


def _scale(staged: Tensor, members: Iterable[Member], first: int) -> None:
    """Apply recorded scales to `staged`, a segment's gradient from element `first` on, and zero
    members whose gradient was dropped."""
    for member in members:
        if member.has_gradient and member.gradient_scale == 1.0:
            continue
        start, stop = member.offset - first, member.offset + member.count - first
        part = staged[max(0, start) : max(0, stop)]
        if member.has_gradient:
            part.mul_(member.gradient_scale)
        else:
            part.zero_()


def apply_scales(members: list[Member]) -> None:
    """Multiply recorded scales into the stored gradients."""
    for member in members:
        if member.has_gradient and member.gradient_scale != 1.0:
            member.gradient.mul_(member.gradient_scale)
        member.gradient_scale = 1.0


def widen_stored(group: Group) -> None:
    """Convert the group's stored gradients to fp32 with their scales applied, to add to them."""
    for segment in group.trained:
        apply_scales(segment.members)
        group.memory.widen_gradient(segment)


def round_stored(group: Group) -> None:
    """Convert the group's stored gradients back to the weights' dtype, for optimizers that want
    gradients like their parameters."""
    for segment in group.trained:
        if segment.is_wide and segment.rounded is not None:
            segment.rounded.copy_(segment.gradient)
            segment.is_wide = False


@dataclass(eq=False)
class _Ring:
    """Staging buffers of one size, used in turn."""

    buffers: list[Tensor]
    transfers: list[Transfer | None]
    read: list[Any]  # points of the computation after which no lane reads a buffer
    turn: int = 0


class GradientStaging:
    """Device memory that gradients are copied from and to, one or two buffers of each size.

    Used by the thread that runs the backward pass. Each copy is reported to `downloaded` or
    `uploaded`.
    """

    def __init__(self, device: Device, downloaded: Report, uploaded: Report) -> None:
        self._device = device
        self._downloaded, self._uploaded = downloaded, uploaded
        self._rings: dict[int, _Ring] = {}  # by size

    @property
    def device_bytes(self) -> int:
        rings = list(self._rings.values())  # other threads ask
        return sum(t.nbytes for ring in rings for t in ring.buffers)

    def free(self, size_bytes: int, depth: int = 0) -> Tensor:
        """Return the next buffer (size_bytes,) uint8 of `depth` buffers of this size (0: as many as
        rounded gradients need); the computation waits until its last transfer is done."""
        buffer, transfer = self.next(size_bytes, depth)
        if transfer is not None:
            transfer.wait_compute("gradients")
        return buffer

    def next(self, size_bytes: int, depth: int = 0) -> tuple[Tensor, Transfer | None]:
        """Return the next buffer as `free` does, and its last transfer, for the caller to wait for
        before the buffer is written."""
        ring = self._rings.setdefault(size_bytes, _Ring([], [], []))
        if len(ring.buffers) < (depth or staging_depth(size_bytes)):
            fresh = device_flat(self._device.torch_device, size_bytes)
            ring.buffers.append(self._device.for_copies(fresh))
            ring.transfers.append(None)
            ring.read.append(None)
            ring.turn = len(ring.buffers) - 1
        else:
            ring.turn = (ring.turn + 1) % len(ring.buffers)
            self._device.wait_for(ring.read[ring.turn])
        return ring.buffers[ring.turn], ring.transfers[ring.turn]

    def download(
        self, group: Group, host: Tensor, values: Tensor, size_bytes: int, depth: int = 0,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[Transfer, Tensor]:  # fmt: skip
        """Copy `values` (on the device), or these ranges of them, to `host` memory of their shape,
        in its dtype.

        They are converted into the next buffer of size_bytes, as `free` returns it; that part of
        the buffer is returned too, with the transfer that arrives last.
        """
        staged = cut(self.free(size_bytes, depth), host.dtype, host.numel()).view(host.shape)
        staged.copy_(values)
        for start, stop in spans or [(0, len(host))]:  # downloads arrive in their order
            part = staged[start:stop]
            transfer = self._device.download(host[start:stop], part)
            self._downloaded(group, transfer, part.nbytes)
        self._used_by(size_bytes, transfer)
        return transfer, staged

    def read_until_now(self, size_bytes: int, staged: Tensor) -> None:
        """Note that the computation so far reads `staged`, in a buffer of size_bytes. The next to
        write to that buffer may be on another lane, which waits for this point."""
        if self._device.lanes > 1:
            ring = self._rings[size_bytes]
            for place, buffer in enumerate(ring.buffers):
                if buffer.data_ptr() == staged.data_ptr():
                    ring.read[place] = self._device.mark()

    def download_directly(self, group: Group, host: Tensor, values: Tensor) -> Transfer:
        """Copy `values` (on the device), which no code writes to any more, to `host` memory."""
        transfer = self._device.download(host, self._device.for_copies(values))
        self._downloaded(group, transfer, host.nbytes)
        return transfer

    def upload(
        self, group: Group, staged: Tensor, host: Tensor, size_bytes: int,
        follows: Sequence[Transfer],
    ) -> Transfer:  # fmt: skip
        """Copy `host` gradients to `staged`, a part of the buffer of size_bytes that was returned
        last, behind the transfers `follows` and the computation so far, which may read it."""
        transfer = self._device.upload(staged, host, None, self._device.mark(), follows)
        self._used_by(size_bytes, transfer)
        self._uploaded(group, transfer, staged.nbytes)
        return transfer

    def _used_by(self, size_bytes: int, transfer: Transfer) -> None:
        """Note the transfer of the buffer that was returned last."""
        ring = self._rings[size_bytes]
        ring.transfers[ring.turn] = transfer

    def holds(self, size_bytes: int, transfer: Transfer) -> bool:
        """Return whether no other transfer used the transfer's buffer since."""
        ring = self._rings.get(size_bytes)
        return ring is not None and any(one is transfer for one in ring.transfers)

    def keep_only(self, sizes: set[int]) -> None:
        """Free buffers of other sizes; transfers from them must be done."""
        self._rings = {size: ring for size, ring in self._rings.items() if size in sizes}

    def drain(self) -> None:
        """Wait for all transfers."""
        for ring in self._rings.values():
            for transfer in ring.transfers:
                if transfer is not None:
                    transfer.wait_host()


class GradientRing:
    """Host memory for gradients that are used up while the backward pass still runs.

    A group that is updated in backward needs host memory for its gradients from their download
    until its update. A few buffers of each size serve all groups, so that gradients do not take two
    bytes a parameter. Used by the thread that runs the backward pass.
    """

    def __init__(self) -> None:
        self._borrowers: dict[Shape, deque[Group]] = {}  # that hold a buffer, oldest first

    def lend(self, group: Group) -> None:
        """Give the group memory for its gradients: its own, a new buffer, or the buffer that
        another group has had for longest, after that group's update, which is waited for."""
        shape = tuple((segment.dtype, segment.elements) for segment in group.trained)
        borrowers = self._borrowers.setdefault(shape, deque())
        if group in borrowers:
            borrowers.remove(group)
        elif group.memory.holds_gradients:
            return  # from steps without updates in backward
        elif len(borrowers) < ring_depth(sum(s.size_bytes for s in group.trained)):
            group.memory.ensure_gradient()
        else:
            oldest = borrowers.popleft()
            oldest.jobs.wait()
            if oldest.jobs.storing is not None:
                oldest.jobs.storing.result()
            group.memory.take_gradients_of(oldest.memory)
        borrowers.append(group)

    def keep(self, group: Group) -> None:
        """Give the group its present buffer, if any, for good."""
        for borrowers in self._borrowers.values():
            if group in borrowers:
                borrowers.remove(group)

    def give_back(self, groups: Iterable[Group]) -> None:
        """Free all buffers, between two steps. A buffer allocated for one of `groups` may since
        have been lent to another."""
        lent = [group for borrowers in self._borrowers.values() for group in borrowers]
        addresses = {address for group in lent for address in group.memory.give_up_gradients()}
        if addresses:
            for group in groups:
                group.memory.drop_gradient_arenas(addresses)
        self._borrowers.clear()


def cut(buffer: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Return the first `count` elements that fit into `buffer` (bytes,)."""
    return buffer[: count * dtype.itemsize].view(dtype)
