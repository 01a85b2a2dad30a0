"""`Gradients`: the open sums of a backward pass, by group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fluxtrain.device.device import Device
from fluxtrain.gradients.buffers import Report
from fluxtrain.gradients.embedding_sum import EmbeddingSum
from fluxtrain.gradients.flat_sum import FlatSum, can_become_sum
from fluxtrain.gradients.host_gradients import Arrival, HostGradients
from fluxtrain.gradients.row_sum import RowSum
from fluxtrain.gradients.views import MemberViews, copy_all
from fluxtrain.gradients.vocab_chunk_sum import VocabChunkSum
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member


class OpenSum(Protocol):
    """The gradients of one group in one backward pass, of any kind."""

    def add_rows(self, rows: RowSum) -> None:
        """Add the gradient of rows of the embedding that is the group's weight."""

    def finish(self, *, passing: bool) -> None:
        """Round the sum, take its norms, download it and set `HostGradients.arrivals`."""


class Gradients:
    """Sums each group's gradients over a backward pass; used by the thread that runs it.

    A group has one flat sum at most, and beside it one of parts: the vocabulary chunks of a head
    (whose weight may be used whole elsewhere in the model), or the rows of an embedding.
    """

    def __init__(
        self,
        device: Device,
        downloaded: Report,
        uploaded: Report,
        arrivals: dict[Group, Arrival] | None = None,
    ) -> None:
        """`arrivals`: gradients on the host, which several devices' sums share."""
        self._device = device
        self.host = HostGradients(device, downloaded, uploaded, arrivals)
        # shared by groups that finish within their backward, by the lane that they compute on
        self._scratch: dict[int, Tensor] = {}
        self._views = MemberViews()
        self._flat: dict[Group, FlatSum] = {}
        self._parts: dict[Group, VocabChunkSum | EmbeddingSum] = {}

    @property
    def device_bytes(self) -> int:
        """Device memory of open sums, of staging, and of rows that stay for further passes."""
        flats = [total.flat for total in list(self._flat.values())]  # other threads ask
        flats += list(self._scratch.values())
        held = {id(flat.untyped_storage()): flat.nbytes for flat in flats}
        parts = sum(total.device_bytes for total in list(self._parts.values()))
        return sum(held.values()) + parts + self.host.device_bytes

    def prefetch(self, group: Group) -> None:
        """Prefetch the host's accumulated gradient before this group's backward, if that backward
        alone adds to it."""
        if group.users <= 1 and group.rows is None:
            self.host.prefetch(group)

    def add(
        self, group: Group, member: Member, gradient: Tensor, *, may_keep: bool = False
    ) -> None:
        """Add one gradient (member.shape, any float dtype, on the device) to the group's sum.

        may_keep: the caller has no further use for the tensor; where it is all of the group's sum
        (the head's weight, 1.2 GB of fp32 for a 3B model) it becomes the sum without a copy.
        """
        if may_keep and group not in self._flat and can_become_sum(group, gradient):
            flat = gradient.view(-1)
            self._flat[group] = FlatSum(group, flat, self.host, self._views, of=member)
            return
        self.add_all([(group, member, gradient)])

    def add_all(self, arriving: Iterable[tuple[Group, Member, Tensor]]) -> None:
        """Add gradients of different parameters, as `add` does; the first ones of a block are
        copied in one launch."""
        copies: list[tuple[Tensor, Tensor]] = []
        for group, member, gradient in arriving:
            total = self._flat.get(group) or self._begin_flat(group)
            total.add(member, gradient, copies)
        copy_all(copies)

    def add_rows(self, group: Group, rows: RowSum) -> None:
        """Add rows of an embedding's gradient; those of a tied one belong to the head's sum. Where
        the embedding is all of its group, `finish` follows at once."""
        total: OpenSum | None = self._parts.get(group)
        if total is None and group.by_rows:
            total = self._parts[group] = EmbeddingSum(group, self.host)
        elif total is None:
            total = self._flat.get(group) or self._begin_flat(group)
        total.add_rows(rows)

    def add_vocab_chunk(
        self, group: Group, member: Member, first: int, values: Tensor, *, rows: int, passing: bool
    ) -> None:
        """Add rows of a member's gradient from `first` on, (n, ...) in fp32 on the device: all of
        this backward pass, downloaded at once. `finish` follows when every row was given.

        rows: of the largest chunk; passing: as for `finish`."""
        total = self._parts.get(group)
        assert not isinstance(total, EmbeddingSum)
        if total is not None and total.has(member, first):  # of another loss in the same pass
            self._parts.pop(group).finish(passing=False)
            total = None
        if total is None:
            total = self._parts[group] = VocabChunkSum(group, self.host, passing=passing)
        total.add(member, first, values, rows)

    def zeros_for_chunk(self, shape: torch.Size) -> Tensor:
        """Return zeros (shape) in fp32 to sum one chunk of a gradient in; the memory serves the
        next chunk too."""
        count, flat = shape.numel(), self._scratch.get(0)
        if flat is None or flat.numel() < count or self._is_taken(flat):
            flat = torch.empty(count, dtype=torch.float32, device=self._device.torch_device)
        return flat[:count].zero_().view(shape)

    def is_open(self, group: Group) -> bool:
        """True while a sum of this group is on the device."""
        return group in self._flat or group in self._parts

    def open_groups(self) -> list[Group]:
        """Return the groups with a sum on the device."""
        return list(dict.fromkeys([*self._flat, *self._parts]))

    def discard(self) -> None:
        """Drop unfinished sums (a backward pass raised)."""
        self._flat.clear()
        self._parts.clear()
        self.host.discard_prefetched()

    def finish(self, group: Group, *, passing: bool = False) -> None:
        """Round the group's sum, take its norms and download it: the group's backward is done.

        passing: the group's update follows at once, so that its gradients need memory only until
        then; waits for an earlier group's update when all of that memory is lent.
        """
        found: list[OpenSum | None]
        found = [self._parts.pop(group, None), self._flat.pop(group, None)]
        for total in found:
            if total is not None:
                total.finish(passing=passing)

    def stage_only(self, sizes: set[int]) -> None:
        """Free staging buffers of other sizes; downloads from them must be done."""
        self.host.staging.keep_only(sizes)
        self._views.forget()

    def _begin_flat(self, group: Group) -> FlatSum:
        flat = self._memory_for(group)
        stays = flat is self._scratch.get(group.lane)
        total = FlatSum(group, flat, self.host, self._views, flat_stays=stays)
        self._flat[group] = total
        return total

    def _memory_for(self, group: Group) -> Tensor:
        """Return fp32 memory for the group's sum; groups with several users, whose sums stay open
        until the end of the pass, get memory of their own."""
        n = group.trained_elements
        device = self._device.torch_device
        scratch = self._scratch.get(group.lane)
        if group.users > 1 or (scratch is not None and self._is_taken(scratch)):
            return torch.empty(n, dtype=torch.float32, device=device)
        if scratch is None or scratch.numel() < n:
            self._views.forget()
            scratch = self._scratch[group.lane] = torch.empty(n, dtype=torch.float32, device=device)
        return scratch

    def _is_taken(self, scratch: Tensor) -> bool:
        return any(total.flat is scratch for total in self._flat.values())
