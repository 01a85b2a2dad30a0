"""The search for the layout that the rule in `placement` prefers among those that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from fluxtrain.plan.facts import Capacity, Head, ModelFacts, Offload
from fluxtrain.plan.footprint import Footprint, Layout, footprint
from fluxtrain.plan.heads import heads_for
from fluxtrain.plan.request import RunRequest, count_or
from fluxtrain.plan.spread import DeviceFirst
from fluxtrain.plan.tables import embedding_for

AUTO_SHARE = 0.9  # of the budget, where the rule chooses; the rest is for fragmentation
FIXED_SHARE = 0.5  # of the budget, where the rows are not known: the rest is for activations
HOST_SHARE = 0.9  # of the available host memory
BATCH_LIMIT_ROWS = 32
CHUNK_TOKENS = 4096  # at once keep a GPU busy
MOST_COUNTS = 192  # of groups on the device, all of which are tried: a model of 126 blocks has less
SOME_COUNTS = 64  # of more groups: one and a half per cent of the model apart


@dataclass(frozen=True)
class Limits:
    """Bytes that a layout may take; None is no limit."""

    device_bytes: int | None
    spare_bytes: int | None  # of the device, that optional residents may fill up
    host_bytes: int | None


@dataclass(frozen=True)
class Search:
    """One question to the rule."""

    facts: ModelFacts
    capacity: Capacity
    request: RunRequest

    @cached_property
    def budget_bytes(self) -> int | None:
        """Of the device: the wish, or what is free if that is less."""
        known = (self.request.budget_bytes, self.capacity.device_free_bytes)
        return min((size for size in known if size is not None), default=None)

    @cached_property
    def limits(self) -> Limits:
        """Explicit request may fill the budget, choices leave a reserve."""
        request, rows_known = self.request, self.facts.row is not None
        set_rows = request.batch_rows is not None and request.chunk_rows != "auto"
        explicit = request.offload != "auto" and (set_rows or not rows_known)
        spare = AUTO_SHARE if rows_known else FIXED_SHARE
        budget, host = self.budget_bytes, self.capacity.host_available_bytes
        return Limits(
            None if budget is None else int(budget * (1.0 if explicit else AUTO_SHARE)),
            None if budget is None else int(budget * spare),
            None if host is None else int(host * (1.0 if explicit else HOST_SHARE)),
        )

    def need(self, layout: Layout) -> Footprint:
        """What `layout` takes."""
        return footprint(self.facts, layout, has_gpu=self.capacity.has_gpu)

    def fits(self, layout: Layout, *, spare: bool = False) -> bool:
        """Whether both peaks stay within; `spare`: within what optional residents may fill."""
        return self.holds(self.need(layout), spare=spare)

    def holds(self, need: Footprint, *, spare: bool = False) -> bool:
        """The same of a layout that needs so much."""
        limits = self.limits
        device = limits.spare_bytes if spare else limits.device_bytes
        on_device = device is None or need.device_bytes <= device
        return on_device and (limits.host_bytes is None or need.host_bytes <= limits.host_bytes)

    def find(self) -> Layout | None:
        """The preferred layout, or None when nothing fits."""
        for head, offloads in product(self.heads, self._rounds()):
            for start in self.starts(head):
                for offload in offloads:
                    layout = self._filled(replace(start, offload=offload))
                    if layout is not None:
                        return layout
        return None

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """How the head may be copied: by choice in chunks only where nothing fits otherwise."""
        return heads_for(self.facts, self.request)

    def nearest(self) -> Layout:
        """Of the layouts with the fewest rows, the one that comes nearest to fitting: among those
        that the device holds, or else the smallest there, so that the numbers can be acted on."""
        fewest = list(self.starts(self.heads[-1]))[-1]
        layouts = [
            layout
            for offloads in self._rounds()
            for offload in offloads
            for layout in self._least(replace(fewest, offload=offload))
        ]
        limit = self.limits.device_bytes
        held = [one for one in layouts if limit is None or self.need(one).device_bytes <= limit]
        if not held:
            return min(layouts, key=lambda one: self.need(one).device_bytes)
        return min(held, key=self._pressure)

    def fills(self, layout: Layout) -> bool:
        """May the rule fill the device with residents? An explicit `max` asks for the least of it;
        without a GPU the device is host memory, and nothing is gained."""
        streams = layout.offload == "weights" or (
            layout.offload == "max" and self.request.offload == "auto"
        )
        return streams and self.capacity.has_gpu

    def leaves_inputs_on_device(self, layout: Layout) -> bool:
        """May those of the last blocks stay on the device where the others' go? Not where all of
        them go by wish, as with an explicit `max`, nor where the device is host memory."""
        asked = self.request.activations != "auto" or self.request.offload == "max"
        return layout.offloads_activations and not asked and self.capacity.has_gpu

    def one_more_group(self, layout: Layout) -> Layout:
        """The same with the next group on the device, and no optional resident."""
        count = layout.device_groups + 1
        kept = self._kept_blocks(count, layout.device_first)
        return replace(layout, device_groups=count, resident_blocks=kept)

    def _rounds(self) -> tuple[tuple[Offload, ...], ...]:
        """`max` is the last resort: a smaller batch is preferred to it."""
        request = self.request
        if request.offload != "auto":
            return ((request.offload,),)
        placed = request.resident_blocks != "auto" or request.device_groups != "auto"
        if placed or not self.capacity.has_gpu:
            return (("weights",), ("max",))
        return (("none", "weights"), ("max",))

    def starts(self, head: Head, chunk_tokens: int = CHUNK_TOKENS) -> Iterator[Layout]:
        """Batches and their chunks, the largest first, of about `chunk_tokens` at most."""
        first = Layout(
            offload="none",
            passes=self.request.passes,
            optimizer_in_backward=self.request.optimizer_in_backward,
            activations="host" if self.request.activations == "host" else "device",
            blocks_without_recompute=count_or(self.request.blocks_without_recompute, 0),
            device_first="embedding"
            if self.request.device_first == "auto"
            else self.request.device_first,
            embedding=embedding_for(self.facts, self.request, 0),
            head=head,
            deferred_moments=bool(self.request.deferred_moments)
            and not self.request.optimizer_in_backward,
            slots=self.request.slots,
        )
        if self.facts.row is None:
            yield first
            return
        for batch in self._batches():
            most = _power_of_two(chunk_tokens // self.facts.row.sequence_length)
            for chunk in self._chunks(batch, most):
                embedding = embedding_for(self.facts, self.request, batch)
                yield replace(first, batch_rows=batch, chunk_rows=chunk, embedding=embedding)

    def _batches(self) -> list[int]:
        if self.request.batch_rows is not None:
            return [self.request.batch_rows]
        return _halvings(_power_of_two(min(BATCH_LIMIT_ROWS, self.request.data_rows or 1 << 30)))

    def _chunks(self, batch_rows: int, most_rows: int) -> list[int]:
        if self.request.chunk_rows != "auto":
            return [min(self.request.chunk_rows, batch_rows)]
        return _halvings(min(batch_rows, most_rows))

    def _filled(self, layout: Layout) -> Layout | None:
        """`layout` with as many device groups, then resident blocks, as are wanted and fit."""
        layouts = self._least(layout)
        if not self.fills(layout):
            optional = layout.offload == "none" and self.request.offload == "auto"
            return layouts[0] if self.fits(layouts[0], spare=optional) else None
        for candidate in layouts:
            if self.fits(candidate, spare=True):
                return self._with_residents(candidate)
        return next(filter(self.fits, reversed(layouts)), None)

    def _least(self, layout: Layout) -> list[Layout]:
        """`layout` for every number of device groups to try, most first; no optional resident."""
        every = len(self.facts.groups)
        asked = min(count_or(self.request.device_groups, 0), every)
        counts = [asked]
        if layout.offload == "none":
            counts = [every]
        elif self.fills(layout) and self.request.device_groups == "auto":
            counts = tried_counts(every)[::-1]
        streams = layout.offload in ("weights", "max")
        least = self._kept_blocks if streams else self.host_blocks
        return [
            replace(
                layout,
                device_groups=count,
                resident_blocks=least(count, layout.device_first),
            )
            for count in counts
        ]

    def _with_residents(self, layout: Layout) -> Layout:
        if self.request.resident_blocks != "auto":
            return layout
        blocks = self.host_blocks(layout.device_groups, layout.device_first)
        for resident in tried_counts(blocks)[:0:-1]:
            fuller = replace(layout, resident_blocks=resident)
            if self.fits(fuller, spare=True):
                return fuller
        return layout

    def _kept_blocks(self, device_groups: int, first: DeviceFirst) -> int:
        return min(
            count_or(self.request.resident_blocks, 0), self.host_blocks(device_groups, first)
        )

    def host_blocks(self, device_groups: int, first: DeviceFirst) -> int:
        """Blocks on the host when `device_groups` groups are not."""
        return len(self.facts.by_tier(device_groups, first)[1].blocks)

    def _pressure(self, layout: Layout) -> float:
        """How many times the room of the resource that is pressed hardest."""
        need, limits = self.need(layout), self.limits
        device = need.device_bytes / limits.device_bytes if limits.device_bytes else 0.0
        host = need.host_bytes / limits.host_bytes if limits.host_bytes else 0.0
        return max(device, host)


def tried_counts(most: int) -> list[int]:
    """Numbers of groups that are tried, 0 to `most`; of many only some, evenly: what each of them
    takes has to be added up over all groups."""
    steps = most if most <= MOST_COUNTS else SOME_COUNTS
    return [most * step // max(1, steps) for step in range(steps + 1)]


def _halvings(rows: int) -> list[int]:
    """12, 6, 3, 1."""
    return [rows >> shift for shift in range(rows.bit_length())]


def _power_of_two(rows: int) -> int:
    """The largest that is no more than `rows`; at least 1."""
    return 1 << (max(1, rows).bit_length() - 1)
