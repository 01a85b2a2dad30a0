"""`VocabChunkSum`: the gradient of a head that streams in vocabulary chunks, each sent at once.

A tied head's weight is an embedding too, whose own gradient comes last, for the rows that were
looked up. What the chunks add to these rows is kept in fp32 until then, so that they are rounded
once; they are downloaded a second time, and replace what was downloaded with the chunks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fluxtrain.core.device.device import Transfer
from fluxtrain.core.gradients.host_gradients import Arrival, HostGradients, cut, widen_stored
from fluxtrain.core.gradients.row_sum import RowSum, RowTransfer, exchanged_rows
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member


class VocabChunkSum:
    """The vocabulary chunks of one backward pass so far.

    A gradient of an earlier pass is added on the device, to which it is uploaded chunk by chunk
    (`_again`). Where rows of it are still to be put in place and are not known here, it is added on
    the host (`_on_host`), which waits.
    """

    def __init__(self, group: Group, host: HostGradients, *, passing: bool) -> None:
        self.group = group
        self._host = host
        host.wait_for_update(group)
        host.allocate(group, passing=passing)
        earlier = group.has_gradient
        rows, transfers = host.take_rows(group), host.transfers_of(group)
        in_place = [transfer for transfer in transfers if not isinstance(transfer, RowTransfer)]
        self._on_host = earlier and rows is None and len(in_place) < len(transfers)
        self._again = earlier and not self._on_host
        # of the earlier pass: gradients (elements,), their downloads, rows not put in place yet
        self._before = {s: s.gradient for s in group.trained} if earlier else {}
        self._before_transfers = in_place if earlier else []
        self._before_rows = rows if earlier else None
        # with other processes the rows of all are added on the host
        together = host.exchange.ranks.world > 1
        self._kept = None if self._on_host or together else _rows_looked_up(group)
        self._kept_are_complete = False  # the lookup's gradient was added to them
        self._late: list[RowSum] = []  # of lookups, to be added on the host
        self._given: dict[int, set[int]] = {}  # first rows, by member index
        self._transfers: list[Transfer] = []
        # by member index and first row of a chunk: 2-norms (n,) of its rows
        self._norms: dict[int, dict[int, Tensor]] = {}
        if self._on_host:
            host.wait(group)
            widen_stored(group)

    @property
    def device_bytes(self) -> int:
        """Return the device memory of rows that are kept, and of lookups that are added on the
        host."""
        kept = 0 if self._kept is None else self._kept.values.nbytes
        return kept + sum(rows.values.nbytes for rows in list(self._late))  # other threads ask

    def has(self, member: Member, first: int) -> bool:
        """Return whether the chunk from row `first` on was added already."""
        return first in self._given.get(member.index, ())

    def add(self, member: Member, first: int, values: Tensor, rows: int) -> None:
        """Send rows (n, ...) of the member's gradient from `first` on, in fp32 on the device; the
        largest chunk has `rows`."""
        self._given.setdefault(member.index, set()).add(first)
        if self._on_host:
            to = member.gradient[first : first + len(values)]
            (to.add_ if member.has_gradient else to.copy_)(values.to("cpu"))
            return
        group, staging, segment = self.group, self._host.staging, member.segment
        if self._again and member.has_gradient:
            self._add_earlier(member, first, values, rows)
        if self._again:
            group.memory.take_wide_gradient(segment)
        if self._host.exchange.is_on:
            self._host.exchange.reduce(values)
        to = member.gradient[first : first + len(values)]
        self._host.scatter.forget(segment.gradient)
        size_bytes = rows * to[:1].nbytes
        transfer, staged = staging.download(group, to, values, size_bytes)
        self._transfers.append(transfer)
        self._norms.setdefault(member.index, {})[first] = _norms_of_rows(staged)
        staging.read_until_now(size_bytes, staged)
        if self._kept is not None:
            self._kept.take_from(first, values)

    def _add_earlier(self, member: Member, first: int, values: Tensor, rows: int) -> None:
        """Add the host's gradient of these rows, from the earlier pass, to `values`."""
        host = member.slice(self._before[member.segment])[first : first + len(values)]
        size_bytes, staging = rows * host[:1].nbytes, self._host.staging
        staged = cut(staging.free(size_bytes), host.dtype, host.numel()).view(host.shape)
        transfer = staging.upload(self.group, staged, host, size_bytes, self._before_transfers)
        transfer.wait_compute("gradients")
        if self._before_rows is not None:
            self._before_rows.put_into(first, staged)
        if member.gradient_scale != 1.0:
            staged.mul_(member.gradient_scale)
        values.add_(staged)
        staging.read_until_now(size_bytes, staged)

    def add_rows(self, rows: RowSum) -> None:
        """Add the gradient of looked-up rows."""
        kept = self._kept
        if kept is None or self._kept_are_complete or rows.places.rows is not kept.places.rows:
            self._late.append(rows)
            return
        kept.values.add_(rows.values)
        self._kept_are_complete = True

    def finish(self, *, passing: bool) -> None:
        """Round and download the kept rows, and tell the host's gradients that
        everything is sent."""
        group, host = self.group, self._host
        rounded = self._download_kept() if self._kept_are_complete else None
        arrival = self._arrival()
        if not passing:
            arrival.rows = rounded
        host.arrivals[group] = arrival
        for index in self._given:
            group.members[index].has_gradient = True
            group.members[index].gradient_scale = 1.0
        self._carry_over()
        exchanges = host.exchange.finishes()
        for late in self._late:
            rows = exchanged_rows(late, host.exchange, torch.float32) if exchanges else late
            host.add_rows(group, rows)

    def _download_kept(self) -> RowSum:
        """Download the kept rows, rounded, over those downloaded with the chunks."""
        kept = self._kept
        assert kept is not None
        to, rows = self.group.members[0].gradient, kept.places.rows
        rounded = kept.values.to(to.dtype)
        transfer = self._host.download_rows(self.group, rounded, partial(to.index_copy_, 0, rows))
        ((index, chunks),) = self._norms.items()
        norms = torch.cat([chunks[first] for first in sorted(chunks)])
        norms.index_copy_(0, kept.on_device, _norms_of_rows(rounded))
        self._norms[index] = {0: norms}
        self._transfers.append(transfer)
        return RowSum(kept.places, kept.on_device, rounded)

    def _carry_over(self) -> None:
        """Copy the members without an addition in this pass to where the others' sums now are, in
        fp32."""
        for segment, before in self._before.items():
            left = [m for m in segment.members if m.index not in self._given]
            for member in left if segment.gradient is not before else ():
                if member.has_gradient:
                    self._host.wait(self.group)
                    member.gradient.copy_(member.slice(before))

    def _arrival(self) -> Arrival:
        """Return the downloads with their norms, which are the same however the rows were cut."""
        if self._on_host:
            return Arrival([], None, {})
        norms = [
            torch.linalg.vector_norm(torch.cat([chunks[first] for first in sorted(chunks)]))
            for chunks in self._norms.values()
        ]
        places = {index: place for place, index in enumerate(self._norms)}
        return Arrival(self._transfers, torch.stack(norms), places)


def _rows_looked_up(group: Group) -> RowSum | None:
    """Return fp32 memory for the rows of the only lookup that waits for its gradient; None where
    none or several wait."""
    awaited = [] if group.rows is None else list(group.rows.awaited)
    if len(awaited) != 1 or awaited[0].uploaded is None:
        return None
    places, on_device = awaited[0].places, awaited[0].uploaded.places
    shape = places.count, group.members[0].shape[1]
    values = torch.empty(shape, dtype=torch.float32, device=on_device.device)
    return RowSum(places, on_device, values)


def _norms_of_rows(values: Tensor) -> Tensor:
    """Return the 2-norms (n,) in fp32 of (n, ...)."""
    rows = values.view(len(values), -1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms
