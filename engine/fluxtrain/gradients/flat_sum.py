"""`FlatSum`: all gradients of one group in one backward pass, flat and in fp32 on the device.

A block's chunks add to it. When the block's backward is done the sum is rounded to the weights'
dtype and downloaded in one transfer a segment. fp16 gradients that overflow arrive as infinity:
their norms tell, and the step is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fluxtrain.device.transfer import Transfer
from fluxtrain.gradients.host_gradients import Arrival, HostGradients
from fluxtrain.gradients.row_sum import RowSum
from fluxtrain.gradients.views import MemberViews, apply_scales, norms_of
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member, Segment


class FlatSum:
    """The sum of one group.

    `views` are of memory that is used again and again: of staging, and of `flat` if `flat_stays`.
    of: `flat` is the gradient of this member, which is all that the group has.
    """

    def __init__(
        self, group: Group, flat: Tensor, host: HostGradients, views: MemberViews, *,
        flat_stays: bool = False, of: Member | None = None,
    ) -> None:  # fmt: skip
        self.group = group
        self.flat = flat  # (trained_elements,) fp32
        self._host, self._views = host, views
        self._touched = set[int]() if of is None else {of.index}  # members with a gradient
        self._parts: dict[int, Tensor] = {}  # of `flat`, by member index, in the members' shapes
        cuts = views if flat_stays else MemberViews()
        for segment, part in self._segments():
            members = zip(segment.members, cuts.of(segment, part), strict=True)
            self._parts |= {member.index: view for member, view in members}

    def add(self, member: Member, gradient: Tensor, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Add a member's gradient; the first one is appended to `copies` (to, source) instead."""
        part = self._parts[member.index]
        if member.index in self._touched:
            part.add_(gradient)
        else:
            copies.append((part, gradient))
            self._touched.add(member.index)

    def add_rows(self, rows: RowSum) -> None:
        """Add rows of a tied embedding to the gradient of the head, which is the same weight."""
        member = self.group.members[0]
        embedding = self._parts[member.index]
        if member.index not in self._touched:
            embedding.zero_()
            self._touched.add(member.index)
        embedding.index_add_(0, rows.on_device, rows.values.float())

    def finish(self, *, passing: bool) -> None:
        """Round the sum, take the norms and download it; a group on the device keeps it there."""
        group, host = self.group, self._host
        host.wait_for_update(group)
        self._clear_untouched()
        host.allocate(group, passing=passing)
        stays = group.placement.gradients == "device"
        host.arrivals[group] = self._store_on_device() if stays else self._download()
        for index in self._touched:
            group.members[index].has_gradient = True

    def _download(self) -> Arrival:
        """Download the sum, rounded, or in fp32 with what earlier backward passes left there."""
        group, host = self.group, self._host
        transfers: list[Transfer] = []
        norms: list[Tensor] = []
        members: list[Member] = []
        follows = host.transfers_in_place(group)
        host.take_rows(group)  # more than rows is added
        for segment, flat in self._segments():
            mine = [m for m in segment.members if m.has_gradient or m.index in self._touched]
            if any(m.has_gradient for m in mine):
                host.add_stored(group, segment, flat, follows)
                norms.append(norms_of([self._parts[m.index] for m in mine], group))
                host.scatter.forget(segment.gradient)
                transfers += host.download_sum(group, segment, flat)
            elif mine:
                segment.is_wide = False
                host.scatter.forget(segment.gradient)
                to, size_bytes = segment.gradient, segment.size_bytes
                transfer, staged = host.staging.download(group, to, flat, size_bytes)
                norms += self._norms(segment, staged)
                host.staging.read_until_now(size_bytes, staged)
                transfers.append(transfer)
            members += mine
        return Arrival.of(transfers, norms, members)

    def _store_on_device(self) -> Arrival:
        """Store the sum, or add it to what earlier backward passes left, on the device."""
        group = self.group
        members = [m for s in group.trained for m in s.members if m.index in self._touched]
        norms: list[Tensor] = []
        again = group.has_gradient
        for segment, flat in self._segments():
            mine = [m for m in segment.members if m.index in self._touched]
            if again:
                apply_scales(mine)
                group.widen_gradient(segment)
            to = segment.gradient
            if not again and len(mine) == len(segment.members):
                to.copy_(flat)
                mine = []
            for member in mine:
                into, arrived = member.slice(to), member.slice(flat)
                (into.add_ if again and member.has_gradient else into.copy_)(arrived)
            norms += self._norms(segment, to)
        return Arrival.of([], norms, members)

    def _norms(self, segment: Segment, flat: Tensor) -> list[Tensor]:
        """Return the norms of the segment's rounded gradients `flat` as one tensor, or none where
        it has no gradient."""
        views = zip(segment.members, self._views.of(segment, flat), strict=True)
        mine = [view for member, view in views if member.index in self._touched]
        return [norms_of(mine, self.group)] if mine else []

    def _segments(self) -> Iterator[tuple[Segment, Tensor]]:
        """Yield each trained segment with its range of `flat`."""
        start = 0
        for segment in self.group.trained:
            yield segment, self.flat[start : start + segment.elements]
            start += segment.elements

    def _clear_untouched(self) -> None:
        """Zero padding and members without a gradient, so that whole ranges can be updated."""
        end = base = 0
        for segment in self.group.trained:
            for member in segment.by_offset:
                if member.index in self._touched:
                    if end < base + member.offset:
                        self.flat[end : base + member.offset].zero_()
                    end = base + member.offset + member.count
            base += segment.elements
        if end < base:
            self.flat[end:base].zero_()


def can_become_sum(group: Group, gradient: Tensor) -> bool:
    """True when this gradient of a member is laid out as all of the group's flat sum."""
    flat = gradient.dtype == torch.float32 and gradient.is_contiguous()
    return flat and gradient.numel() == group.trained_elements
