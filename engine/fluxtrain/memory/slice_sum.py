"""The gradient of one backward pass over a head that came in slices: each goes home at once.

A tied head's weight is an embedding too, whose own gradient comes last, for the rows that were
looked up. What the slices give to these rows is kept in fp32 until then, so that they are rounded
once; they go home a second time, and are put in their places over what went with the slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxtrain.device.transfer import Transfer
from fluxtrain.memory.arrival import Arrival
from fluxtrain.memory.group import Group
from fluxtrain.memory.rows import RowSum, RowTransfer
from fluxtrain.memory.segment import Member, Segment


@dataclass(eq=False)
class Kept:
    """Rows that a lookup is going to add to."""

    rows: Tensor  # (U,) int64 on the host, ascending
    on_device: Tensor  # (U,) int64
    values: Tensor  # (U, H) fp32 on the device
    added: bool = False

    @staticmethod
    def of(group: Group) -> Kept | None:
        """Of the one lookup that waits for its gradient; None for none, or several."""
        awaited = [] if group.rows is None else list(group.rows.awaited)
        if len(awaited) != 1 or awaited[0].brought is None:
            return None
        rows, places = awaited[0].places.rows, awaited[0].brought.places
        shape = len(rows), group.members[0].shape[1]
        return Kept(rows, places, torch.empty(shape, dtype=torch.float32, device=places.device))

    def take(self, first: int, values: Tensor) -> None:
        """Of a slice (n, H) from row `first` on, those that are kept."""
        mine, places = self._within(first, len(values))
        if len(mine):
            torch.index_select(values, 0, places, out=mine)

    def put(self, first: int, values: Tensor) -> None:
        """The same the other way."""
        mine, places = self._within(first, len(values))
        if len(mine):
            values.index_copy_(0, places, mine)

    def _within(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """What is kept of `count` rows from `first` on, and where it stands among them."""
        bounds = torch.searchsorted(self.rows, torch.tensor([first, first + count]))
        start, stop = bounds.tolist()
        return self.values[start:stop], self.on_device[start:stop] - first


@dataclass(eq=False)
class SliceSum:
    """What has come so far."""

    again: bool  # to gradients of an earlier backward pass, which come up slice by slice
    at_home: bool  # the same, but they are added to on the host, which waits
    kept: Kept | None
    before: dict[Segment, Tensor]  # those gradients (elements,)
    before_transfers: list[Transfer]  # on their way home
    before_rows: Kept | None  # rows of them that the host has not put in their places yet
    late: list[RowSum] = field(default_factory=list)  # of lookups, to be added at home
    _given: dict[int, set[int]] = field(default_factory=dict)  # first rows, by member index
    _transfers: list[Transfer] = field(default_factory=list)
    # by member index and first row of a slice: 2-norms (n,) of its rows
    _norms: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    @property
    def indices(self) -> list[int]:
        """Of the members whose gradients came."""
        return list(self._given)

    @property
    def device_bytes(self) -> int:
        """Of rows that are kept, or of lookups that wait to be added at home."""
        kept = 0 if self.kept is None else self.kept.values.nbytes
        return kept + sum(rows.values.nbytes for rows in list(self.late))  # other threads ask

    @staticmethod
    def of(group: Group, on_their_way: list[Transfer], rows: Kept | None) -> SliceSum:
        """Before the first slice; `on_their_way`: the group's gradients, and `rows` those of them
        that come last. Where these are not known here they are waited for, and all is added to at
        home."""
        if not group.has_gradient:
            return SliceSum(False, False, Kept.of(group), {}, [], None)
        transfers = [transfer for transfer in on_their_way if not isinstance(transfer, RowTransfer)]
        at_home = rows is None and len(transfers) < len(on_their_way)
        before = {segment: segment.gradient for segment in group.trained}
        kept = None if at_home else Kept.of(group)
        return SliceSum(not at_home, at_home, kept, before, transfers, rows)

    def has(self, member: Member, first: int) -> bool:
        """Did the slice from row `first` on come already?"""
        return first in self._given.get(member.index, ())

    def as_it_counts(self, member: Member, first: int, before: Tensor) -> None:
        """Make of `before` (n, ...), a slice of what this adds to, that which is meant: with
        the rows that the host has not put there yet, and times the scale that was recorded."""
        if self.before_rows is not None:
            self.before_rows.put(first, before)
        if member.gradient_scale != 1.0:
            before.mul_(member.gradient_scale)

    def add_at_home(self, member: Member, first: int, values: Tensor, home: Tensor) -> None:
        """Rows (n, ...) of the member's gradient from `first` on are added at home; waits for the
        device."""
        self._given.setdefault(member.index, set()).add(first)
        fresh = values.to("cpu")
        (home.add_ if member.has_gradient else home.copy_)(fresh)

    def send(
        self, member: Member, first: int, values: Tensor, staged: Tensor, transfer: Transfer
    ) -> None:
        """Rows (n, ...) from `first` on, as they are and rounded, are on their way home."""
        self._given.setdefault(member.index, set()).add(first)
        self._transfers.append(transfer)
        self._norms.setdefault(member.index, {})[first] = _norms_of_rows(staged)
        if self.kept is not None:
            self.kept.take(first, values)

    def add_rows(self, rows: RowSum) -> None:
        """The gradient of rows that were looked up."""
        kept = self.kept
        if kept is None or kept.added or rows.places.rows is not kept.rows:
            self.late.append(rows)
            return
        kept.values.add_(rows.values)
        kept.added = True

    def replace(self, rounded: Tensor, transfer: RowTransfer) -> None:
        """The kept rows (U, H) with all that was added, rounded, follow the slices."""
        assert self.kept is not None
        ((index, slices),) = self._norms.items()
        norms = torch.cat([slices[first] for first in sorted(slices)])
        norms.index_copy_(0, self.kept.on_device, _norms_of_rows(rounded))
        self._norms[index] = {0: norms}
        self._transfers.append(transfer)

    def arrival(self) -> Arrival:
        """All has come; the norms are the same however the rows were cut."""
        if self.at_home:
            return Arrival([], None, {})
        norms = [
            torch.linalg.vector_norm(torch.cat([slices[first] for first in sorted(slices)]))
            for slices in self._norms.values()
        ]
        places = {index: place for place, index in enumerate(self._norms)}
        return Arrival(self._transfers, torch.stack(norms), places)


def _norms_of_rows(values: Tensor) -> Tensor:
    """2-norms (n,) in fp32 of (n, ...)."""
    rows = values.view(len(values), -1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms
