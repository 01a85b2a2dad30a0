"""`EmbeddingSum`: the gradient of an embedding that is a group of its own, by rows.

Only the rows that a batch looked up have one, so only they are downloaded, and the host puts them
in their places. They also stay on the device until the step's last backward pass, which is where
further passes are added to them.
"""

from __future__ import annotations

from torch import Tensor

from fluxtrain.core.gradients.host_gradients import Arrival, HostGradients
from fluxtrain.core.gradients.row_sum import RowSum
from fluxtrain.core.memory.group import Group


class EmbeddingSum:
    """The rows of one backward pass."""

    def __init__(self, group: Group, host: HostGradients) -> None:
        self.group = group
        self._host = host
        self._rows: RowSum | None = None

    @property
    def device_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.values.nbytes

    def add_rows(self, rows: RowSum) -> None:
        """Take the rows, which are all of this backward pass."""
        self._rows = rows

    def finish(self, *, passing: bool) -> None:
        """Download the rows with those of earlier backward passes of the step."""
        group, host, rows = self.group, self._host, self._rows
        assert rows is not None
        host.wait_for_update(group)
        host.allocate(group, passing=passing)
        before = host.take_rows(group)
        if group.has_gradient and before is None:
            host.add_rows(group, rows)
        else:
            host.arrivals[group] = self._download(rows, before, passing=passing)
        group.members[0].has_gradient = True

    def _download(self, rows: RowSum, before: RowSum | None, *, passing: bool) -> Arrival:
        """Make `rows`, those of `before` and zeros elsewhere the whole gradient. passing: no other
        pass adds to it."""
        group, host = self.group, self._host
        member, buffers = group.members[0], group.rows
        assert buffers is not None
        if before is not None and member.has_gradient:
            rows = before.plus(rows, host.device, member.gradient_scale)
            member.gradient_scale = 1.0
            group.memory.take_wide_gradient(member.segment)
        places, table_rows = rows.places.rows, buffers.table_rows
        to, scatter = member.segment.gradient, host.scatter

        def put(landed: Tensor) -> None:
            scatter.fill(to, places, landed, table_rows)

        transfer = host.download_rows(group, rows.values, put)
        norm = rows.norm(table_rows)
        host.clear_ahead(member.segment)
        return Arrival([transfer], norm, {member.index: 0}, None if passing else rows)
