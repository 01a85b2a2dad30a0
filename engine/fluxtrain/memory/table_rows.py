"""Gradients of a table's rows on their way home, where they are put in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fluxtrain.device.device import Device
from fluxtrain.device.transfer import Transfer
from fluxtrain.memory.arrival import Arrival
from fluxtrain.memory.cuts import apply_scales, stored
from fluxtrain.memory.gradient_staging import GradientStaging
from fluxtrain.memory.group import Group
from fluxtrain.memory.rows import RowBuffers, RowSum, RowTransfer, Scatter

Report = Callable[[Group, Transfer, int], None]  # group, the copy, bytes


class TableRowsHome:
    """The way home of rows, through staging memory and page-locked memory of their own."""

    def __init__(
        self, device: Device, staging: GradientStaging, scatter: Scatter, report: Report
    ) -> None:
        self._device, self._staging, self._scatter = device, staging, scatter
        self._report = report
        self._sums: dict[Group, RowSum] = {}  # of the backward passes of this step so far

    @property
    def device_bytes(self) -> int:
        return sum(rows.values.nbytes for rows in list(self._sums.values()))  # other threads ask

    def knows(self, group: Group) -> bool:
        """Is the table's gradient here, so that more rows can be added to it?"""
        return group in self._sums

    def forget(self, group: Group) -> None:
        """The gradient is another one now, or none."""
        self._sums.pop(group, None)

    def send(
        self, group: Group, rows: RowSum, on_their_way: Iterable[Iterable[Transfer]], *, last: bool
    ) -> Arrival:
        """All of the gradient of a table: these rows, those of earlier backward passes of the step,
        which stay on the device for it, and zeros. `on_their_way`: copies home that nobody wants
        any more. last: no other pass adds to it."""
        member, buffers = group.members[0], group.rows
        assert buffers is not None
        before = self._sums.pop(group, None)
        if before is not None and member.has_gradient:
            rows = before.plus(rows, self._device, member.gradient_scale)
            member.gradient_scale = 1.0
            group.take_wide_memory(member.segment)
        if not last:
            self._sums[group] = rows
        places = rows.places.rows
        home, table_rows = member.segment.gradient, buffers.table_rows

        def put(landed: Tensor) -> None:
            self._scatter.fill(home, places, landed, table_rows)

        transfer = self.send_values(group, rows.values, put)
        norm = rows.norm(table_rows)
        self._scatter.clear_ahead(home, on_their_way)
        return Arrival([transfer], norm, {member.index: 0})

    def send_values(
        self, group: Group, values: Tensor, put: Callable[[Tensor], object]
    ) -> RowTransfer:
        """Rows (U, H) leave; the first who waits for them lets `put` have them."""
        buffers = group.rows
        assert buffers is not None
        landing, arena = buffers.landing(values)
        transfer = self._leave(buffers, values, landing)
        buffers.arrives(transfer)
        self._report(group, transfer, landing.nbytes)

        def land() -> None:
            assert arena.size_bytes >= landing.nbytes  # and is held until here
            put(landing)

        return RowTransfer(transfer, land)

    def _leave(self, buffers: RowBuffers, values: Tensor, landing: Tensor) -> Transfer:
        """Copy rows home: those of one batch through staging memory, sums of several, which
        nobody writes to, as they are."""
        if values.dtype != buffers.dtype or len(values) > buffers.capacity:
            return self._device.download(landing, self._device.for_copies(values))
        size_bytes = buffers.capacity * buffers.row_bytes
        staged = self._staging.free(size_bytes)[: len(values) * buffers.row_bytes]
        staged = staged.view(buffers.dtype).view(values.shape)
        staged.copy_(values)
        transfer = self._device.download(landing, staged)
        self._staging.leaves(size_bytes, transfer)
        return transfer


def add_rows_at_home(group: Group, rows: RowSum) -> None:
    """To what is there, in fp32; waits for the device."""
    member = group.members[0]
    apply_scales([member])
    group.widen_gradient(member.segment)
    fresh = rows.values.to(device="cpu", dtype=torch.float32)
    stored(member).index_add_(0, rows.places.rows, fresh)
