"""Gradients at home that another backward pass of the same step adds to, on the device.

What is there comes up while the group's backward pass is computed, the new gradients are added to
it in fp32, and the sum goes home in fp32. The host computes nothing and waits for nothing, and the
norms are taken on the device as after a first pass. Both ways lead through the staging buffers that
rounded gradients leave through: of bf16 ones two are as large as a segment's sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.memory.arrival import Arrival
from fluxtrain.memory.device import Device, Ticket
from fluxtrain.memory.gradient_staging import GradientStaging
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member, Segment
from fluxtrain.memory.table_rows import Report
from fluxtrain.plan.depths import sum_depth


@dataclass(eq=False)
class _Coming:
    """A piece of what is at home, on its way up."""

    staged: Tensor  # (elements of the piece,) on the device
    ticket: Ticket


class HomeSums:
    """Used by the thread that runs the backward pass. `sent` and `brought` are told each copy."""

    def __init__(
        self, device: Device, staging: GradientStaging, sent: Report, brought: Report
    ) -> None:
        self._device, self._staging = device, staging
        self._sent, self._brought = sent, brought
        self._coming: dict[tuple[Segment, int], _Coming] = {}  # by segment and first element

    def expect(self, group: Group, arrival: Arrival | None) -> None:
        """A backward pass of the group begins: bring up as much as there are buffers for."""
        taken: Counter[int] = Counter()
        for segment in group.trained if group.placement.gradients != "device" else ():
            size = segment.size_bytes
            if not any(member.has_gradient for member in segment.members):
                continue
            for first, stop in _pieces(segment, segment.gradient.dtype):
                if taken[size] == _depth(group, segment):
                    break
                taken[size] += 1
                buffer, busy = self._staging.next(size, _depth(group, segment))
                before = [*([] if busy is None else [busy]), *tickets_of(arrival)]
                self._coming[segment, first] = self._bring(
                    group, segment, first, stop, buffer, before
                )

    def add(self, group: Group, segment: Segment, flat: Tensor, arrival: Arrival | None) -> None:
        """Add what is at home to `flat` (elements,) fp32, zero where there is no new gradient."""
        for first, stop in _pieces(segment, segment.gradient.dtype):
            piece = self._coming.pop((segment, first), None)
            if piece is None or not self._staging.holds(segment.size_bytes, piece.ticket):
                buffer = self._staging.free(segment.size_bytes, _depth(group, segment))
                before = tickets_of(arrival)
                piece = self._bring(group, segment, first, stop, buffer, before)
            piece.ticket.wait_compute("gradients")
            _as_it_counts(piece.staged, segment.members, first)
            flat[first:stop].add_(piece.staged)
        for member in segment.members:
            member.gradient_scale = 1.0

    def send(self, group: Group, segment: Segment, flat: Tensor) -> list[Ticket]:
        """The sum `flat` (elements,) fp32 is this step's gradient; it goes home as it is."""
        group.take_wide_memory(segment)
        tickets: list[Ticket] = []
        for first, stop in _pieces(segment, torch.float32):
            home = segment.gradient[first:stop]
            size_bytes, depth = segment.size_bytes, _depth(group, segment)
            ticket, _ = self.send_part(group, home, flat[first:stop], size_bytes, depth)
            tickets.append(ticket)
        return tickets

    def send_part(
        self, group: Group, home: Tensor, values: Tensor, size_bytes: int, depth: int = 0
    ) -> tuple[Ticket, Tensor]:
        """`values` in fp32 on the device go to `home` of their shape, in its dtype, through one of
        `depth` buffers of size_bytes (0: as for a first pass); what lies in that buffer."""
        buffer = self._staging.free(size_bytes, depth)
        staged = _cut(buffer, home.dtype, home.numel()).view(home.shape)
        staged.copy_(values)
        ticket = self._device.download(home, staged)
        self._staging.leaves(size_bytes, ticket)
        self._sent(group, ticket, staged.nbytes)
        return ticket, staged

    def add_part(
        self, group: Group, home: Tensor, values: Tensor, size_bytes: int,
        before: Sequence[Ticket], as_it_counts: Callable[[Tensor], object],
    ) -> None:  # fmt: skip
        """Add `home`, as `as_it_counts` makes it, to `values` of its shape in fp32 on the device,
        through a buffer of size_bytes; `before`: copies to that home."""
        buffer = self._staging.free(size_bytes)
        staged = _cut(buffer, home.dtype, home.numel()).view(home.shape)
        ticket = self._upload(group, staged, home, size_bytes, before)
        ticket.wait_compute("gradients")
        as_it_counts(staged)
        values.add_(staged)

    def discard(self) -> None:
        """A backward pass raised: nobody adds to what comes."""
        self._coming.clear()

    def _bring(
        self, group: Group, segment: Segment, first: int, stop: int, buffer: Tensor,
        before: Sequence[Ticket],
    ) -> _Coming:  # fmt: skip
        home = segment.gradient[first:stop]
        staged = _cut(buffer, home.dtype, stop - first)
        return _Coming(staged, self._upload(group, staged, home, segment.size_bytes, before))

    def _upload(
        self, group: Group, staged: Tensor, home: Tensor, size_bytes: int, before: Sequence[Ticket]
    ) -> Ticket:
        """Once the computation so far has read what was in that memory."""
        ticket = self._device.upload(staged, home, None, self._device.mark(), before)
        self._staging.leaves(size_bytes, ticket)
        self._brought(group, ticket, staged.nbytes)
        return ticket


def tickets_of(arrival: Arrival | None) -> list[Ticket]:
    """Copies on their way home."""
    return [] if arrival is None else arrival.tickets


def _depth(group: Group, segment: Segment) -> int:
    """Buffers that the segment's sum passes through."""
    return sum_depth(segment.size_bytes, is_block=group.kind == "block")


def _pieces(segment: Segment, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """First and last element of what fits into a buffer of the segment's size, in `dtype`."""
    most = segment.size_bytes // dtype.itemsize
    for first in range(0, segment.elements, most):
        yield first, min(segment.elements, first + most)


def _cut(buffer: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The first `count` elements that fit into `buffer` (bytes,)."""
    return buffer[: count * dtype.itemsize].view(dtype)


def _as_it_counts(staged: Tensor, members: Iterable[Member], first: int) -> None:
    """`staged`, from element `first` of a segment on, with the scales that were recorded, and zero
    for members whose gradient was dropped."""
    for member in members:
        if member.has_gradient and member.gradient_scale == 1.0:
            continue
        start, stop = member.offset - first, member.offset + member.count - first
        part = staged[max(0, start) : max(0, stop)]
        if member.has_gradient:
            part.mul_(member.gradient_scale)
        else:
            part.zero_()
