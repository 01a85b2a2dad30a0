"""`Gradients`: the open sums of a backward pass, by group; and `FlatSum`, the usual kind.

All gradients of one group in one backward pass are summed flat and in fp32 on the device. When the
block's backward is done the sum is rounded to the weights' dtype and downloaded in one transfer a
segment. fp16 gradients that overflow arrive as infinity: their norms show it, and the step is
skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.gradients.host_gradients import Arrival, HostGradients, Report
from fluxtrain.core.gradients.host_sums import HostSums
from fluxtrain.core.gradients.row_sum import RowSum, exchanged_rows, norm_by_rows
from fluxtrain.core.gradients.vocab_chunk_sum import VocabChunkSum
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member, Segment
from fluxtrain.core.ranks.exchange import NOT_EXCHANGED, Exchange
from fluxtrain.events.trace.lanes import OTHER_RANKS
from fluxtrain.plan.depths import sums_at_once


class Gradients:
    """Sums each group's gradients over a backward pass; used by the thread that runs it.

    A group has at most one flat sum and one sum of a part: the vocabulary chunks of a head (whose
    weight may be used whole elsewhere in the model), or the rows of an embedding.
    """

    def __init__(
        self,
        device: Device,
        downloaded: Report,
        uploaded: Report,
        arrivals: dict[Group, Arrival] | None = None,
        exchange: Exchange = NOT_EXCHANGED,
    ) -> None:
        """Begin without sums. `arrivals`: gradients on the host, which several devices' sums
        share; `exchange`: with other processes, of every sum that is complete."""
        self._device = device
        self.host = HostGradients(device, downloaded, uploaded, arrivals, exchange)
        # shared by groups that finish within their backward, by the lane that they compute on
        self._scratch: dict[int, list[Tensor]] = {}
        self._views = MemberViews()
        self._flat: dict[Group, FlatSum] = {}
        self._sent: FlatSum | None = None  # that other processes add to
        self._read: dict[int, Any] = {}  # points after which no lane reads a scratch, by its id
        self._parts: dict[Group, VocabChunkSum | EmbeddingSum] = {}
        self.sums: HostSums | None = None  # where the host adds those of other processes

    @property
    def device_bytes(self) -> int:
        """Return the device memory of open sums, of staging, and of rows that stay for further
        passes."""
        flats = [total.flat for total in self._sums()]
        flats += [scratch for mine in list(self._scratch.values()) for scratch in mine]
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
        total: FlatSum | VocabChunkSum | EmbeddingSum | None = self._parts.get(group)
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
        count = shape.numel()
        fitting = [scratch for scratch in self._free_scratch(0) if scratch.numel() >= count]
        flat = self._after_reads(fitting[0]) if fitting else self._empty(count)
        return flat[:count].zero_().view(shape)

    def is_open(self, group: Group) -> bool:
        """Return whether a sum of this group is on the device."""
        return group in self._flat or group in self._parts

    def open_groups(self) -> list[Group]:
        """Return the groups with a sum on the device."""
        return list(dict.fromkeys([*self._flat, *self._parts]))

    def discard(self) -> None:
        """Drop unfinished sums (a backward pass raised)."""
        self._flat.clear()
        if self._sent is not None:
            self._sent.abandon()
            self._sent = None
        self._parts.clear()
        self.host.discard_prefetched()

    def finish(self, group: Group, *, passing: bool = False) -> list[Group]:
        """Round the group's sum, take its norms and download it: the group's backward is done.
        Return the groups of which this was done: a sum that other processes add to stays open while
        they do, until the next group is finished, or until `settle`.

        passing: the group's update follows at once, so that its gradients need memory only until
        then; waits for an earlier group's update when all of that memory is lent.
        """
        parts, flat = self._parts.pop(group, None), self._flat.pop(group, None)
        done = self.settle() if self._sent is not None and self._sent.group is group else []
        if parts is not None:
            parts.finish(passing=passing)
        if flat is None:
            return [*done, group]
        sent = flat.send(passing=passing, sums=self.sums)
        done += self.settle()  # that of the group before, which may compute until here
        if sent:
            self._sent = flat
            return done
        flat.finish()
        return [*done, group]

    def settle(self) -> list[Group]:
        """Finish the sum that other processes add to, if there is one; return its group."""
        sent, self._sent = self._sent, None
        if sent is None:
            return []
        self._device.used_here(sent.flat)
        sent.finish()
        scratch = self._scratch.get(sent.group.lane, ())
        if self._device.lanes > 1 and any(one is sent.flat for one in scratch):
            self._read[id(sent.flat)] = self._device.mark()  # perhaps on another lane
        return [sent.group]

    def free_memory(self) -> None:
        """Free the device memory that sums and downloads, which must be done, keep between
        passes."""
        self.discard()
        self._scratch.clear()
        self._read.clear()
        self.stage_only(set())

    def stage_only(self, sizes: set[int]) -> None:
        """Free staging buffers of other sizes; downloads from them must be done."""
        self.host.staging.keep_only(sizes)
        self._views.forget()

    def _begin_flat(self, group: Group) -> FlatSum:
        flat = self._memory_for(group)
        stays = any(flat is scratch for scratch in self._scratch.get(group.lane, ()))
        total = FlatSum(group, flat, self.host, self._views, flat_stays=stays)
        self._flat[group] = total
        return total

    def _memory_for(self, group: Group) -> Tensor:
        """Return fp32 memory for the group's sum; groups with several users, whose sums stay open
        until the end of the pass, get memory of their own."""
        count, mine = group.trained_elements, self._scratch.setdefault(group.lane, [])
        free = self._free_scratch(group.lane)
        if group.users > 1:
            return self._empty(count)
        for flat in free:
            if flat.numel() >= count:
                return self._after_reads(flat)
        if free:
            self._views.forget()
            mine[:] = [flat for flat in mine if flat is not free[0]]
        made, most = self._empty(count), sums_at_once(self.host.exchange.ranks.world)
        if len(mine) < most:
            mine.append(made)
        return made

    def _after_reads(self, flat: Tensor) -> Tensor:
        """Return a scratch that this lane may write to, once no other lane reads it."""
        self._device.wait_for(self._read.pop(id(flat), None))
        return flat

    def _free_scratch(self, lane: int) -> list[Tensor]:
        """Return the memory for sums that none is in."""
        taken = {id(total.flat) for total in self._sums()}
        return [flat for flat in self._scratch.get(lane, ()) if id(flat) not in taken]

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float32, device=self._device.torch_device)

    def _sums(self) -> list[FlatSum]:
        sent = self._sent  # other threads ask
        return [*self._flat.values(), *([] if sent is None else [sent])]


class FlatSum:
    """The gradient sum of one group.

    `views` are views of memory used again and again: of staging, and of `flat` if `flat_stays`.
    of: `flat` is the gradient of this member, the only one of the group.
    """

    def __init__(
        self, group: Group, flat: Tensor, host: HostGradients, views: MemberViews, *,
        flat_stays: bool = False, of: Member | None = None,
    ) -> None:  # fmt: skip
        self.group = group
        self.flat = flat  # (trained_elements,) fp32
        self._host, self._views = host, views
        self._sent: Transfer | None = None  # the sum over processes, under way
        self._added: Arrival | None = None  # of one that the host adds up
        self._passing, self._again = False, set[Segment]()
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

    def send(self, *, passing: bool, sums: HostSums | None) -> bool:
        """Complete this process's sum, and begin to add those of others, if there are any, on the
        device or in `sums`; return whether there are. `finish` follows."""
        group, host = self.group, self._host
        host.wait_for_update(group)
        self._clear_untouched()
        self._passing = passing
        self._again = self._add_stored(stays=group.is_on("device", "gradients"))
        if host.exchanges(group):
            flat = self.flat[: group.trained_elements]
            if sums is None or not sums.takes(group):
                self._sent = host.exchange.begin(flat, host.device, group.placement.card)
            else:
                host.exchange.agree()
                host.allocate(group, passing=passing)
                self._sent, self._added = sums.begin(group, flat, host, self._again)
            # what another rank alone has used counts here too, with the same numbers everywhere
            self._touched.update(m.index for s in group.trained for m in s.members)
        return self._sent is not None

    def abandon(self) -> None:
        """Wait for the sums of others, whatever becomes of them: they use this one's memory, and
        what the host adds is written to the group's gradients."""
        if self._sent is not None:
            with suppress(Exception):
                self._sent.wait_host()
                if self._added is not None:
                    self._added.wait()

    def finish(self) -> None:
        """Round the sum, take the norms and download it; a group on the device keeps it there."""
        group, host = self.group, self._host
        if self._sent is not None:
            self._sent.wait_compute(OTHER_RANKS)
        stays, again = group.is_on("device", "gradients"), self._again
        exchanged, stored = self._sent is not None, self._added
        if stored is None:
            host.allocate(group, passing=self._passing)
            stored = self._store_on_device(again) if stays else self._download(again, exchanged)
        host.arrivals[group] = stored
        host.store_on_disk(group)
        for index in self._touched:
            group.members[index].has_gradient = True

    def _add_stored(self, *, stays: bool) -> set[Segment]:
        """Add the sums of earlier backward passes; return the segments that have any."""
        group, host = self.group, self._host
        again: set[Segment] = set()
        follows = [] if stays else host.transfers_in_place(group)
        host.take_rows(group)  # more than rows is added
        for segment, flat in self._segments():
            earlier = [m for m in segment.members if m.has_gradient]
            if not earlier:
                continue
            again.add(segment)
            if not stays:
                host.add_stored(group, segment, flat, follows)
            for member in earlier if stays else ():
                self._parts[member.index].add_(member.gradient, alpha=member.gradient_scale)
                member.gradient_scale = 1.0
            self._touched.update(member.index for member in earlier)
        return again

    def _download(self, again: set[Segment], exchanged: bool) -> Arrival:
        """Download the sum: rounded, or in fp32 that of several backward passes (`again`); of an
        exchanged one what is at home here."""
        group, host = self.group, self._host
        shares = group.shares if exchanged else None
        transfers: list[Transfer] = []
        norms: list[Tensor] = []
        members: list[Member] = []
        for segment, flat in self._segments():
            mine = [m for m in segment.members if m.index in self._touched]
            spans = [(0, segment.elements)] if shares is None else shares.own(segment.elements)
            if segment in again:
                norms.append(norms_of([self._parts[m.index] for m in mine], group))
                host.scatter.forget(segment.gradient)
                transfers += host.download_sum(group, segment, flat, spans)
            elif mine:
                segment.is_wide = False
                host.scatter.forget(segment.gradient)
                to, size_bytes = segment.gradient, segment.size_bytes
                transfer, staged = host.staging.download(group, to, flat, size_bytes, spans=spans)
                norms += self._norms(segment, staged)
                host.staging.read_until_now(size_bytes, staged)
                transfers.append(transfer)
            members += mine
        return Arrival.of(transfers, norms, members)

    def _store_on_device(self, again: set[Segment]) -> Arrival:
        """Store the sum on the device: rounded, or in fp32 that of several backward passes."""
        group = self.group
        members = [m for s in group.trained for m in s.members if m.index in self._touched]
        norms: list[Tensor] = []
        for segment, flat in self._segments():
            if segment in again:
                group.memory.take_wide_gradient(segment)
            to = segment.gradient
            to.copy_(flat)
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
    """Return whether a member's gradient has the layout of the group's whole flat sum."""
    flat = gradient.dtype == torch.float32 and gradient.is_contiguous()
    return flat and gradient.numel() == group.trained_elements


class MemberViews:
    """Views of the members' ranges, made once: a slice and a view for each parameter of a block
    cost the thread that queues its backward pass more than a copy does."""

    def __init__(self) -> None:
        self._made: dict[tuple[Segment, int], list[Tensor]] = {}  # they hold what they are views of

    def of(self, segment: Segment, flat: Tensor) -> list[Tensor]:
        """Return the ranges of the segment's members, in their order and shapes, of `flat`
        (elements,), which must be memory that is used again and again: views are kept."""
        key = segment, flat.data_ptr()
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = [member.slice(flat) for member in segment.members]
        return found

    def forget(self) -> None:
        """Drop all views, since some of their memory is freed."""
        self._made.clear()


def copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each (to, source), all `to` of one dtype; in one launch if the sources are of one dtype
    too: for mixed lists torch's fused copy took the first tensor's (pytorch/pytorch#173383)."""
    if len({source.dtype for _, source in copies}) == 1:
        torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
        return
    for to, source in copies:
        to.copy_(source)


def norms_of(views: list[Tensor], group: Group) -> Tensor:
    """Return the 2-norms (views,) in fp32 of rounded gradients of the group.

    Their memory is allocated first and at once: scalars allocated between the norm's temporaries
    would keep malloc from reusing those (a quarter of a gigabyte for a model of 0.2 on CPU).
    """
    if group.by_rows:
        return torch.stack([norm_by_rows(view).squeeze(0) for view in views])
    norms = torch.empty(len(views), dtype=torch.float32, device=views[0].device)
    for view, norm in zip(views, norms.unbind(), strict=True):
        torch.linalg.vector_norm(view, dtype=torch.float32, out=norm)
    return norms


class EmbeddingSum:
    """The gradient of an embedding that is a group of its own: the rows of one backward pass.

    Only the rows that a batch looked up have one, so only they are downloaded, and the host puts
    them in their places. They also stay on the device until the step's last backward pass, which is
    where further passes are added to them.
    """

    def __init__(self, group: Group, host: HostGradients) -> None:
        self.group = group
        self._host = host
        self._rows: RowSum | None = None

    @property
    def device_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.values.nbytes

    def add_rows(self, rows: RowSum) -> None:
        """Take the rows, which are the whole gradient of this backward pass."""
        self._rows = rows

    def finish(self, *, passing: bool) -> None:
        """Download the rows with those of earlier backward passes of the step."""
        group, host, rows = self.group, self._host, self._rows
        assert rows is not None
        host.wait_for_update(group)
        host.allocate(group, passing=passing)
        before = host.take_rows(group)
        exchanges = host.exchanges(group)
        if group.has_gradient and before is None:
            host.add_rows(group, rows)
            if exchanges:
                host.exchange.reduce_on_host(group.members[0].gradient)
        else:
            how = {"passing": passing, "exchanges": exchanges}
            host.arrivals[group] = self._download(rows, before, **how)
        group.members[0].has_gradient = True

    def _download(
        self, rows: RowSum, before: RowSum | None, *, passing: bool, exchanges: bool
    ) -> Arrival:
        """Make the whole gradient of `rows`, the rows of `before`, and zeros elsewhere. passing:
        no other pass adds to it; exchanges: other processes do."""
        group, host = self.group, self._host
        member, buffers = group.members[0], group.rows
        assert buffers is not None
        if before is not None and member.has_gradient:
            rows = before.plus(rows, host.device, member.gradient_scale)
            member.gradient_scale = 1.0
            group.memory.take_wide_gradient(member.segment)
        if exchanges:
            rows = exchanged_rows(rows, host.exchange, member.gradient.dtype)
        places, table_rows = rows.places.rows, buffers.table_rows
        to, scatter = member.segment.gradient, host.scatter

        def put(landed: Tensor) -> None:
            scatter.fill(to, places, landed, table_rows)

        transfer = host.download_rows(group, rows.values, put)
        norm = rows.norm(table_rows)
        host.clear_ahead(member.segment)
        kept = None if passing else rows
        return Arrival([transfer], norm, {member.index: 0}, rows=kept)
