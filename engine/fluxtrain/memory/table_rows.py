"""Gradients of a table's rows on their way home, where they are put in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fluxtrain.memory.arrival import Arrival
from fluxtrain.memory.cuts import apply_scales, stored
from fluxtrain.memory.device import Device, Ticket
from fluxtrain.memory.gradient_staging import GradientStaging
from fluxtrain.memory.group import Group
from fluxtrain.memory.rows import RowSum, RowTicket, Scatter

Report = Callable[[Group, Ticket, int], None]  # group, the copy, bytes


class TableRowsHome:
    """The way home of rows, through staging memory and page-locked memory of their own."""

    def __init__(
        self, device: Device, staging: GradientStaging, scatter: Scatter, report: Report
    ) -> None:
        self._device, self._staging, self._scatter = device, staging, scatter
        self._report = report

    def send(self, group: Group, rows: RowSum, on_their_way: Iterable[Iterable[Ticket]]) -> Arrival:
        """All of the gradient of a table: these rows, and zeros. `on_their_way`: copies home that
        nobody wants any more."""
        member, places, buffers = group.members[0], rows.places.rows, group.rows
        assert buffers is not None
        home, table_rows = member.segment.gradient, buffers.table_rows

        def put(landed: Tensor) -> None:
            self._scatter.fill(home, places, landed, table_rows)

        ticket = self.send_values(group, rows.values, put)
        norm = rows.norm(table_rows)
        self._scatter.clear_ahead(home, on_their_way)
        return Arrival([ticket], norm, {member.index: 0})

    def send_values(
        self, group: Group, values: Tensor, put: Callable[[Tensor], object]
    ) -> RowTicket:
        """Rows (U, H) leave; the first who waits for them lets `put` have them."""
        buffers = group.rows
        assert buffers is not None
        size_bytes = buffers.capacity * buffers.row_bytes
        staged = self._staging.free(size_bytes)[: len(values) * buffers.row_bytes]
        staged = staged.view(buffers.dtype).view(values.shape)
        staged.copy_(values)
        landing, arena = buffers.landing(len(values))
        ticket = self._device.download(landing, staged)
        self._staging.leaves(size_bytes, ticket)
        self._report(group, ticket, staged.nbytes)

        def land() -> None:
            assert arena.size_bytes >= landing.nbytes  # and is held until here
            put(landing)

        return RowTicket(ticket, land)


def add_rows_at_home(group: Group, rows: RowSum) -> None:
    """To what is there, in fp32; waits for the device."""
    member = group.members[0]
    apply_scales([member])
    group.widen_gradient(member.segment)
    fresh = rows.values.to(device="cpu", dtype=torch.float32)
    stored(member).index_add_(0, rows.places.rows, fresh)
