"""Gradients: summed in one flat fp32 buffer on the device, brought home once a block.

A block's chunks add to the flat buffer; when its backward is done the sum is rounded to the
weights' dtype and copied home in one transfer. A second backward before the optimizer step is
added in fp32 (bf16 sums are off by 0.35 % at 8 terms, 3 % at 512) to what comes up from home for
it. fp16 gradients that overflow arrive as infinity: their norms tell, and the step is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluxtrain.memory.arrival import Arrival, arrival_of
from fluxtrain.memory.cuts import Cuts, apply_scales, copy_all, norms_of, stored, widen_at_home
from fluxtrain.memory.device import Device, Ticket
from fluxtrain.memory.flat_sum import FlatSum, could_be
from fluxtrain.memory.gradient_ring import GradientRing
from fluxtrain.memory.gradient_staging import GradientStaging
from fluxtrain.memory.group import Group
from fluxtrain.memory.home_sums import HomeSums, tickets_of
from fluxtrain.memory.rows import RowSum, RowTicket, Scatter
from fluxtrain.memory.segment import Member, Segment
from fluxtrain.memory.slice_sum import Kept, SliceSum
from fluxtrain.memory.table_rows import Report, TableRowsHome, add_rows_at_home


class Gradients:
    """Collects the gradients of all groups; used by the thread that runs the backward pass."""

    def __init__(self, device: Device, report: Report, brought: Report) -> None:
        self._device = device
        self._report = report
        self._scratch: Tensor | None = None  # shared by groups that finish within their backward
        self._open: dict[Group, FlatSum] = {}
        self._open_rows: dict[Group, RowSum] = {}
        self._open_slices: dict[Group, SliceSum] = {}
        self._kept_rows: dict[Group, Kept] = {}  # of tied heads in slices, as they go home last
        self._scatter = Scatter()
        self._cuts = Cuts()
        self._staging = GradientStaging(device)
        self._sums_at_home = HomeSums(device, self._staging, report, brought)
        self._table_rows = TableRowsHome(device, self._staging, self._scatter, report)
        self._ring = GradientRing()
        self.arrivals: dict[Group, Arrival] = {}
        self._unwanted: dict[Group, list[Ticket]] = {}  # on their way where others may be put

    @property
    def device_bytes(self) -> int:
        sums = list(self._open.values())  # other threads ask
        held = {id(s.flat.untyped_storage()): s.flat.nbytes for s in sums}
        if self._scratch is not None:
            held[id(self._scratch.untyped_storage())] = self._scratch.nbytes
        slices = sum(s.device_bytes for s in list(self._open_slices.values()))
        beside = self._staging.device_bytes + self._table_rows.device_bytes
        beside += sum(kept.values.nbytes for kept in list(self._kept_rows.values()))
        return sum(held.values()) + slices + beside

    def expect(self, group: Group) -> None:
        """A backward pass of the group begins, which alone adds to its gradients: what is at home
        of an earlier one comes up meanwhile."""
        if group.users <= 1 and group.rows is None:
            self._sums_at_home.expect(group, self.arrivals.get(group))

    def add(
        self, group: Group, member: Member, gradient: Tensor, *, may_keep: bool = False
    ) -> None:
        """Add one gradient (member.shape, any float dtype, on the device) to the group's sum.

        may_keep: the caller has no further use for the tensor; where it is all of the group's sum
        (the head's weight, 1.2 GB of fp32 for a 3B model) it becomes the sum without a copy.
        """
        if may_keep and group not in self._open and could_be(group, gradient):
            flat = gradient.view(-1)
            self._open[group] = FlatSum(flat, self._parts(group, flat), {member.index})
            return
        self.add_all([(group, member, gradient)])

    def add_all(self, arriving: Iterable[tuple[Group, Member, Tensor]]) -> None:
        """Add gradients of different parameters, as `add` does; the first ones of a block are
        copied in one launch."""
        to: list[Tensor] = []
        first: list[Tensor] = []
        for group, member, gradient in arriving:
            total = self._open.get(group) or self._begin(group)
            if member.index in total.touched:
                total.parts[member.index].add_(gradient)
            else:
                to.append(total.parts[member.index])
                first.append(gradient)
                total.touched.add(member.index)
        copy_all(to, first)

    def add_rows(self, group: Group, rows: RowSum) -> None:
        """The gradient of an embedding that is all of its group; `finish` follows at once. That of
        a tied one is added to the sum that the head's is in."""
        if group.by_rows:
            self._open_rows[group] = rows
            return
        slices = self._open_slices.get(group)
        if slices is not None:
            slices.add_rows(rows)
            return
        total = self._open.get(group) or self._begin(group)
        member = group.members[0]
        table = total.parts[member.index]
        if member.index not in total.touched:
            table.zero_()
            total.touched.add(member.index)
        table.index_add_(0, rows.on_device, rows.values.float())

    def slice_sum(self, shape: torch.Size) -> Tensor:
        """Zeros (shape) in fp32 for one slice of a gradient, until the next one is asked for."""
        count, flat = shape.numel(), self._scratch
        if flat is None or flat.numel() < count or self._scratch_is_taken():
            flat = torch.empty(count, dtype=torch.float32, device=self._device.torch_device)
        return flat[:count].zero_().view(shape)

    def add_slice(
        self, group: Group, member: Member, first: int, values: Tensor, *, rows: int, passing: bool
    ) -> None:
        """Rows of a member's gradient from `first` on, (n, ...) in fp32 on the device: all of this
        backward pass, sent home at once. `finish` follows when every row was given.

        rows: of the largest slice; passing: as for `finish`."""
        found = self._open_slices.get(group)
        if found is not None and found.has(member, first):  # of another loss in the same pass
            self._finish_slices(group, self._open_slices.pop(group), passing=False)
            found = None
        if found is None:
            self._let_the_update_end(group)
            self._take_memory(group, passing=passing)
            found = self._open_slices[group] = self._slices_of(group)
        if found.at_home:
            found.add_at_home(member, first, values, stored(member)[first : first + len(values)])
            return
        part, sums = slice(first, first + len(values)), self._sums_at_home
        if found.again and member.has_gradient:
            earlier = member.slice(found.before[member.segment])[part]
            size_bytes, tickets = rows * earlier[:1].nbytes, found.before_tickets
            as_it_counts = partial(found.as_it_counts, member, first)
            sums.add_part(group, earlier, values, size_bytes, tickets, as_it_counts)
        if found.again:
            group.take_wide_memory(member.segment)
        home = stored(member)[part]
        self._scatter.forget(member.segment.gradient)
        ticket, staged = sums.send_part(group, home, values, rows * home[:1].nbytes)
        found.send(member, first, values, staged, ticket)

    def _slices_of(self, group: Group) -> SliceSum:
        """Before the first slice of a backward pass."""
        rows = self._kept_rows.pop(group, None)
        found = SliceSum.of(group, tickets_of(self.arrivals.get(group)), rows)
        if found.at_home:
            self.wait(group)
            widen_at_home(group)
        return found

    def is_open(self, group: Group) -> bool:
        """True while a sum of this group is on the device."""
        return any(group in sums for sums in self._sums)

    def discard(self) -> None:
        """Drop unfinished sums (a backward pass raised)."""
        for sums in self._sums:
            sums.clear()
        self._sums_at_home.discard()

    def open_groups(self) -> list[Group]:
        return list(dict.fromkeys(group for sums in self._sums for group in sums))

    def finish(self, group: Group, *, passing: bool = False) -> None:
        """The group's backward is done: round, take the norms, and send the sum home.

        passing: the group's update follows at once, so that its gradients need memory only until
        then; waits for an earlier group's update when all of that memory is lent.
        """
        slices = self._open_slices.pop(group, None)
        if slices is not None:
            self._finish_slices(group, slices, passing=passing)
        rows, total = self._open_rows.pop(group, None), self._open.pop(group, None)
        if rows is not None or total is not None:
            self._let_the_update_end(group)
        if rows is not None:
            self._finish_rows(group, rows, passing=passing)
        if total is None:
            return
        total.clear_untouched(group)
        self._take_memory(group, passing=passing)
        if group.placement.gradients == "device":
            self._keep(group, total)
        else:
            self._send(group, total)
        for index in total.touched:
            group.members[index].has_gradient = True

    def _take_memory(self, group: Group, *, passing: bool) -> None:
        if passing and group.placement.gradients != "device":
            self._ring.lend(group)
        else:
            self.keep_memory(group)

    def keep_memory(self, group: Group) -> None:
        """The group's gradients have memory of its own from now on."""
        self._ring.keep(group)
        group.ensure_gradient()

    def _finish_rows(self, group: Group, rows: RowSum, *, passing: bool) -> None:
        """As `finish`; nothing but the rows crosses the bus."""
        self._take_memory(group, passing=passing)
        if group.has_gradient and not self._table_rows.knows(group):
            self._add_rows_at_home(group, rows)
        else:
            unwanted = self._unwanted.values()
            self.arrivals[group] = self._table_rows.send(group, rows, unwanted, last=passing)
        group.members[0].has_gradient = True

    def _finish_slices(self, group: Group, slices: SliceSum, *, passing: bool) -> None:
        kept = slices.kept
        if kept is not None and kept.added:
            home, rows = stored(group.members[0]), kept.rows
            rounded = kept.values.to(home.dtype)
            put = partial(home.index_copy_, 0, rows)
            slices.replace(rounded, self._table_rows.send_values(group, rounded, put))
            if not passing:
                self._kept_rows[group] = replace(kept, values=rounded)
        self.arrivals[group] = slices.arrival()
        for index in slices.indices:
            group.members[index].has_gradient = True
            group.members[index].gradient_scale = 1.0
        self._carry_over(group, slices)
        for late in slices.late:
            self._add_rows_at_home(group, late)

    def _carry_over(self, group: Group, slices: SliceSum) -> None:
        """Members that nothing was added to, beside others whose sums are in fp32 now."""
        for segment, before in slices.before.items():
            left = [m for m in segment.members if m.index not in slices.indices]
            for member in left if segment.gradient is not before else ():
                if member.has_gradient:
                    self.wait(group)
                    stored(member).copy_(member.slice(before))

    def _add_rows_at_home(self, group: Group, rows: RowSum) -> None:
        self.wait(group)
        add_rows_at_home(group, rows)
        self.arrivals[group] = Arrival([], None, {})

    @property
    def _sums(self) -> tuple[dict[Group, Any], ...]:
        return self._open, self._open_rows, self._open_slices

    def _let_the_update_end(self, group: Group) -> None:
        """This thread waits for the update of the step before, whose moments still read the
        gradients at home. A GPU does not: the group's backward is queued and keeps it busy."""
        waits, started_s = group.under_way, time.perf_counter()
        group.wait()
        if waits:
            self._device.stalls.add_host("moments", time.perf_counter() - started_s)

    def forget(self, group: Group) -> None:
        """The group's gradients are no longer wanted."""
        arrival = self.arrivals.pop(group, None)
        self.looked_at(group)
        if arrival is not None:  # rows are put in their places only when somebody waits
            self._unwanted[group] = [t for t in arrival.tickets if not isinstance(t, RowTicket)]
        for member in group.members:
            member.has_gradient = False
            member.gradient_scale = 1.0
        for segment in group.trained:
            segment.is_wide = False

    def looked_at(self, group: Group) -> None:
        """What is at home may be written to: nobody knows on the device what it is."""
        self._table_rows.forget(group)
        self._kept_rows.pop(group, None)

    def handed_out(self, member: Member) -> None:
        """Others than the engine have what the member's gradient is stored in."""
        self._scatter.handed_out(member.segment.gradient)

    def wait(self, group: Group) -> None:
        """Block until the group's gradients are at home, and nothing else is on its way there."""
        for ticket in self._unwanted.pop(group, ()):
            ticket.wait_host()
        arrival = self.arrivals.get(group)
        if arrival is not None:
            arrival.wait()

    def drain(self) -> None:
        """Wait for all that is on its way home, also of gradients that nobody wants any more."""
        self._staging.drain()

    def give_ring_back(self, groups: Iterable[Group]) -> None:
        """Free what the gradients of eager steps pass through at home, between two steps."""
        self._ring.give_back(groups)

    def stage_only(self, sizes: set[int]) -> None:
        """Give back staging buffers of other sizes; what left through them has arrived."""
        self._staging.keep_only(sizes)
        self._cuts.forget()

    def _begin(self, group: Group) -> FlatSum:
        flat = self._buffer(group)
        total = FlatSum(flat, self._parts(group, flat, stays=flat is self._scratch), set())
        self._open[group] = total
        return total

    def _parts(self, group: Group, flat: Tensor, *, stays: bool = False) -> dict[int, Tensor]:
        """By member index, the members' ranges of a flat sum; `stays`: of all sums."""
        cuts = self._cuts if stays else Cuts()
        parts: dict[int, Tensor] = {}
        start = 0
        for segment in group.trained:
            views = cuts.of(segment, flat[start : start + segment.elements])
            start += segment.elements
            parts |= {m.index: view for m, view in zip(segment.members, views, strict=True)}
        return parts

    def _buffer(self, group: Group) -> Tensor:
        """A flat fp32 buffer; groups with several users keep one of their own while open."""
        n = group.trained_elements
        device = self._device.torch_device
        if group.users > 1 or self._scratch_is_taken():
            return torch.empty(n, dtype=torch.float32, device=device)
        if self._scratch is None or self._scratch.numel() < n:
            self._cuts.forget()
            self._scratch = torch.empty(n, dtype=torch.float32, device=device)
        return self._scratch

    def _scratch_is_taken(self) -> bool:
        return any(s.flat is self._scratch for s in self._open.values())

    def _send(self, group: Group, total: FlatSum) -> None:
        """The sum goes home, rounded, or with what is there of an earlier backward pass."""
        tickets: list[Ticket] = []
        norms: list[Tensor] = []
        members: list[Member] = []
        earlier, start = self._settled(group), 0
        self.looked_at(group)  # what was added is more than rows
        for segment in group.trained:
            flat = total.flat[start : start + segment.elements]
            start += segment.elements
            mine = [m for m in segment.members if m.has_gradient or m.index in total.touched]
            if any(m.has_gradient for m in mine):
                self._sums_at_home.add(group, segment, flat, earlier)
                norms.append(norms_of([total.parts[m.index] for m in mine], group))
                self._scatter.forget(segment.gradient)
                tickets += self._sums_at_home.send(group, segment, flat)
            elif mine:
                segment.is_wide = False
                self._scatter.forget(segment.gradient)
                home, size_bytes = segment.gradient, segment.size_bytes
                ticket, staged = self._sums_at_home.send_part(group, home, flat, size_bytes)
                norms += self._norms(group, segment, staged, total)
                tickets.append(ticket)
            members += mine
        self.arrivals[group] = arrival_of(tickets, norms, members)

    def _settled(self, group: Group) -> Arrival | None:
        """What is on its way home, without rows that the host puts in their places."""
        arrival = self.arrivals.get(group)
        if arrival is not None and any(isinstance(t, RowTicket) for t in arrival.tickets):
            self.wait(group)
            return None
        return arrival

    def _norms(self, group: Group, segment: Segment, flat: Tensor, total: FlatSum) -> list[Tensor]:
        """Of the segment's rounded gradients; one tensor, or none where it has no gradient."""
        views = zip(segment.members, self._cuts.of(segment, flat), strict=True)
        mine = [view for member, view in views if member.index in total.touched]
        return [norms_of(mine, group)] if mine else []

    def _keep(self, group: Group, total: FlatSum) -> None:
        """Gradients of a group that lives on the device stay there."""
        members = [m for s in group.trained for m in s.members if m.index in total.touched]
        norms: list[Tensor] = []
        start, again = 0, group.has_gradient
        for segment in group.trained:
            flat = total.flat[start : start + segment.elements]
            start += segment.elements
            mine = [m for m in segment.members if m.index in total.touched]
            if again:
                apply_scales(mine)
                group.widen_gradient(segment)
            home = segment.gradient
            if not again and len(mine) == len(segment.members):
                home.copy_(flat)
                mine = []
            for member in mine:
                into, arrived = member.slice(home), member.slice(flat)
                (into.add_ if again and member.has_gradient else into.copy_)(arrived)
            norms += self._norms(group, segment, home, total)
        self.arrivals[group] = arrival_of([], norms, members)
