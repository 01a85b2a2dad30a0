"""The search for the layout that the rule in `placement` prefers among those that fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from operator import itemgetter
from typing import Any, Literal

from fluxtrain.plan.capacity import DiskHome
from fluxtrain.plan.depths import DISK_RING_BYTES
from fluxtrain.plan.facts import Capacity, Head, ModelFacts, Offload
from fluxtrain.plan.footprint import (
    DISK_COUNTS,
    Footprint,
    Layout,
    footprint,
    gradient_ring_bytes,
    keepable_count,
    may_be_spilled,
    may_follow,
    may_live_on_disk,
    offloading_blocks,
    slot_count,
    spill_buffer_bytes,
)
from fluxtrain.plan.heads import CHUNKS_GAIN, heads_for
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest, count_or
from fluxtrain.plan.simulation import StepTime, step_time
from fluxtrain.plan.spread import DeviceFirst
from fluxtrain.plan.tables import embedding_for

AUTO_SHARE = 0.9  # of the budget, where the rule chooses; the rest is for fragmentation
FIXED_SHARE = 0.5  # of the budget, where the rows are not known: the rest is for activations
HOST_SHARE = 0.9  # of the available host memory
BATCH_LIMIT_ROWS = 32
CHUNK_TOKENS = 4096  # at once keep a GPU busy
MOST_COUNTS = 192  # of groups on the device, all of which are tried: a model of 126 blocks has less
SOME_COUNTS = 64  # of more groups: one and a half per cent of the model apart


STOPS = {"fast": 1.0, "balanced": 0.5, "fit": 0.0}
GPU_CHUNK_TOKENS = 16_384  # larger chunks use a GPU better still, if there is room for them
CLEARLY = 0.99  # of the time otherwise, at most, for moments to be deferred
WORTH_A_SLOT = 0.998  # of the time with one slot less, at most
FEWEST_SLOTS, MOST_SLOTS = 2, 5
_DIGITS = 6  # of seconds: layouts that differ by less are equally fast
_FIRST_SHARE = 4  # the first moves are of this part of the blocks, later ones of fewer

Count = Literal[
    "device_groups", "resident_blocks", "blocks_without_recompute", "activations_on_device"
]
# In this order they give way where a layout takes too much
COUNTS: tuple[Count, ...] = (
    "activations_on_device",
    "blocks_without_recompute",
    "resident_blocks",
    "device_groups",
)


@dataclass(frozen=True)
class Limits:
    """Bytes that a layout may take; None is no limit."""

    device_bytes: int | None
    spare_bytes: int | None  # of the device, that optional residents may fill up
    host_bytes: int | None


@dataclass(frozen=True)
class Search:
    """Finds the layout that the rule prefers for a model, a machine and a request."""

    facts: ModelFacts
    capacity: Capacity
    request: RunRequest
    disk: DiskHome | None = None  # where frozen weights may live that the host cannot hold
    spill: DiskHome | None = None  # where optimizer states may

    @cached_property
    def budget_bytes(self) -> int | None:
        """Return the device bytes that may be used: those requested, or those free if fewer."""
        known = (self.request.budget_bytes, self.capacity.device_free_bytes)
        return min((size for size in known if size is not None), default=None)

    @cached_property
    def limits(self) -> Limits:
        """Return the limits: an explicit request may fill the budget, automatic choices leave a
        reserve."""
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
        """Return what `layout` takes, with what must live on disk there."""
        return self._settled(layout)[1]

    def settled(self, layout: Layout) -> Layout:
        """Return `layout` with the frozen weights of the fewest blocks on disk, so that the host
        suffices, then the optimizer states of the fewest groups where that was asked for, then
        the gradients and at last the weights of the fewest blocks among them; where it does not
        even so, with what leaves the least on the host, as buffers take some, too. A byte freed
        costs two passes of the disk a step, one of weights four, so there is nothing to weigh."""
        return self._settled(layout)[0]

    def _settled(self, layout: Layout) -> tuple[Layout, Footprint]:
        found = self._needs.get(layout)
        if found is None:
            found = self._needs[layout] = self._settled_anew(layout)
        return found

    def _settled_anew(self, layout: Layout) -> tuple[Layout, Footprint]:
        limit = self.limits.host_bytes
        nothing: dict[str, Any] = dict.fromkeys(DISK_COUNTS, 0)
        if any(getattr(layout, name) for name in nothing):
            layout = replace(layout, **nothing)
        found = [(layout, footprint(self.facts, layout, has_gpu=self.capacity.has_gpu))]
        if limit is None:
            return found[0]

        def lacks() -> int:
            return max(0, found[-1][1].host_bytes - limit)

        def send(count: str, sizes: Sequence[int], buffer_bytes: int) -> None:
            """Send so many of the first sizes to disk that the host suffices."""
            sent: dict[str, Any] = {count: _fewest(sizes, lacks() + buffer_bytes)}
            there = replace(found[-1][0], **sent)
            found.append((there, footprint(self.facts, there, has_gpu=self.capacity.has_gpu)))

        if lacks() and self.disk is not None and not self.disk.unusable:
            may = may_live_on_disk(self.facts, layout)
            send("disk_groups", [group.file_bytes for group in may], DISK_RING_BYTES)
        if lacks() and self.spills:
            groups, blocks = may_be_spilled(self.facts, layout), may_follow(self.facts, layout)
            beside = spill_buffer_bytes(groups)
            send("disk_states", [group.state_bytes for group in groups], beside)
            if lacks() and not (layout.optimizer_in_backward or layout.accumulates):
                sizes = [group.rounded_bytes for group in blocks]
                send("disk_gradients", sizes, gradient_ring_bytes(blocks))
            if lacks():
                send("disk_weights", [group.weight_bytes for group in blocks], DISK_RING_BYTES)
        return min(found, key=lambda one: one[1].host_bytes) if lacks() else found[-1]

    @property
    def spills(self) -> bool:
        """Return whether optimizer states may live on disk: where that was asked for."""
        usable = self.spill is not None and not self.spill.unusable
        return usable and self.request.disk == "on" and self.facts.has_masters

    @cached_property
    def _needs(self) -> dict[Layout, tuple[Layout, Footprint]]:
        return {}

    def fits(self, layout: Layout, *, spare: bool = False) -> bool:
        """Return whether both peaks stay within the limits; `spare`: within the limit for optional
        residents."""
        return self.holds(self.need(layout), spare=spare)

    def holds(self, need: Footprint, *, spare: bool = False) -> bool:
        """Return whether a predicted need stays within the limits, as `fits` does."""
        limits = self.limits
        device = limits.spare_bytes if spare else limits.device_bytes
        on_device = device is None or need.device_bytes <= device
        return on_device and (limits.host_bytes is None or need.host_bytes <= limits.host_bytes)

    def find(self) -> Layout | None:
        """Return the preferred layout, or None when nothing fits."""
        found = self._found()
        return None if found is None else self.settled(found)

    def _found(self) -> Layout | None:
        for head, offloads in product(self.heads, self._rounds()):
            for start in self.starts(head):
                for offload in offloads:
                    layout = self._filled(replace(start, offload=offload))
                    if layout is not None:
                        return layout
        return None

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Return the ways to copy the head: in chunks only by request, or where nothing
        else fits."""
        return heads_for(self.facts, self.request)

    def nearest(self) -> Layout:
        """Return the layout with the fewest rows that comes nearest to fitting: of the layouts
        that fit on the device, else the smallest on it, so that the numbers help the user."""
        fewest = list(self.starts(self.heads[-1]))[-1]
        layouts = [
            layout
            for offloads in self._rounds()
            for offload in offloads
            for layout in self.least(replace(fewest, offload=offload))
        ]
        limit = self.limits.device_bytes
        held = [one for one in layouts if limit is None or self.need(one).device_bytes <= limit]
        if not held:
            return min(layouts, key=lambda one: self.need(one).device_bytes)
        return min(held, key=self._pressure)

    def fills(self, layout: Layout) -> bool:
        """Return whether the rule may fill the device with residents. An explicit `max` asks for
        the least device memory; without a GPU the device is host memory, and nothing is gained."""
        streams = layout.offload == "weights" or (
            layout.offload == "max" and self.request.offload == "auto"
        )
        return streams and self.capacity.has_gpu

    def leaves_inputs_on_device(self, layout: Layout) -> bool:
        """Return whether inputs of the last blocks may stay on the device where the others' are
        offloaded. Not where the user offloads all, as with an explicit `max`, nor where the device
        is host memory."""
        asked = self.request.activations != "auto" or self.request.offload == "max"
        return layout.offloads_activations and not asked and self.capacity.has_gpu

    def one_more_group(self, layout: Layout) -> Layout:
        """Return `layout` with the next group on the device, and without optional residents."""
        count = layout.device_groups + 1
        kept = self._kept_blocks(count, layout.device_first)
        return replace(layout, device_groups=count, resident_blocks=kept)

    def _rounds(self) -> tuple[tuple[Offload, ...], ...]:
        """Yield the strategies in turn; `max` is the last resort, after smaller batches."""
        request = self.request
        if request.offload != "auto":
            return ((request.offload,),)
        placed = request.resident_blocks != "auto" or request.device_groups != "auto"
        if placed or not self.capacity.has_gpu:
            return (("weights",), ("max",))
        return (("none", "weights"), ("max",))

    def starts(self, head: Head, chunk_tokens: int = CHUNK_TOKENS) -> Iterator[Layout]:
        """Yield layouts for each batch and its chunks, the largest first, with chunks of about
        `chunk_tokens` at most."""
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
            most = power_of_two(chunk_tokens // self.facts.row.sequence_length)
            for chunk in self._chunks(batch, most):
                embedding = embedding_for(self.facts, self.request, batch)
                yield replace(first, batch_rows=batch, chunk_rows=chunk, embedding=embedding)

    def _batches(self) -> list[int]:
        if self.request.batch_rows is not None:
            return [self.request.batch_rows]
        return _halvings(power_of_two(min(BATCH_LIMIT_ROWS, self.request.data_rows or 1 << 30)))

    def _chunks(self, batch_rows: int, most_rows: int) -> list[int]:
        if self.request.chunk_rows != "auto":
            return [min(self.request.chunk_rows, batch_rows)]
        return _halvings(min(batch_rows, most_rows))

    def _filled(self, layout: Layout) -> Layout | None:
        """Return `layout` with as many device groups, then resident blocks, as are requested and
        fit."""
        layouts = self.least(layout)
        if not self.fills(layout):
            optional = layout.offload == "none" and self.request.offload == "auto"
            return layouts[0] if self.fits(layouts[0], spare=optional) else None
        for candidate in layouts:
            if self.fits(candidate, spare=True):
                return self._with_residents(candidate)
        return next(filter(self.fits, reversed(layouts)), None)

    def least(self, layout: Layout) -> list[Layout]:
        """Yield `layout` for every number of device groups to try, the largest first, without
        optional residents."""
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
        """Return the number of blocks on the host when `device_groups` groups are not."""
        return len(self.facts.by_tier(device_groups, first)["host"].blocks)

    def _pressure(self, layout: Layout) -> float:
        """Return the need divided by the limit, of the scarcer resource."""
        need, limits = self.need(layout), self.limits
        device = need.device_bytes / limits.device_bytes if limits.device_bytes else 0.0
        host = need.host_bytes / limits.host_bytes if limits.host_bytes else 0.0
        return max(device, host)


def _fewest(sizes: Sequence[int], needed_bytes: int) -> int:
    """Return how many of the first sizes make up so many bytes; all where they do not."""
    sums = list(accumulate(sizes))
    return min(bisect_left(sums, needed_bytes) + 1, len(sums))


def tried_counts(most: int) -> list[int]:
    """Return the numbers of groups to try, from 0 to `most`. Of a large number only some are
    tried, evenly spaced, as each costs a sum over all groups."""
    steps = most if most <= MOST_COUNTS else SOME_COUNTS
    return [most * step // max(1, steps) for step in range(steps + 1)]


def _halvings(rows: int) -> list[int]:
    """Return `rows` and its halves down to 1, as 12, 6, 3, 1."""
    return [rows >> shift for shift in range(rows.bit_length())]


def power_of_two(rows: int) -> int:
    """Return the largest power of two up to `rows`; at least 1."""
    return 1 << (max(1, rows).bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class TimedLayout:
    """A layout that fits, with its memory and the seconds of its step."""

    layout: Layout
    need: Footprint
    time: StepTime

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the memory that the dial limits: the device's, without a GPU the
        host's."""
        return self.need.device_bytes if self.time.has_gpu else self.need.host_bytes


@dataclass(frozen=True, kw_only=True)
class DialStop:
    """One stop of the dial between as fast as possible and as small as possible."""

    name: str
    share: float  # of the memory between the least that runs and all there is
    chosen: TimedLayout


@dataclass(frozen=True)
class TimedSearch:
    """Search the layout of a batch with the shortest predicted step, within a share of the memory.

    A dial from 1 (as fast as possible) to 0 (as little of the device as possible) is a limit: the
    least that any layout of this batch takes, and that share of the memory above it. Without a GPU
    the limit is one of host memory. `search.request.batch_rows` must be set.

    From a layout with everything on the host, rows of the placement table move to the device by
    the seconds that they save per byte: groups altogether, weights of blocks, activations, inputs.
    Where nothing more fits, rows are exchanged against each other, and the ways to run a block (the
    size of chunks, where inputs wait, when moments are updated, slots, the head) are changed, as
    long as that makes the step shorter.
    """

    search: Search
    rates: Rates
    clips: bool = True
    passes: int = 1
    near: Layout | None = None  # that was found with other rows: the search begins there

    def at(self, share: float) -> TimedLayout | None:
        """Return the fastest layout found within the limit of `share`; None where nothing fits. A
        smaller share's layout is taken where it is faster, so more memory is never slower."""
        if share not in self._stops:
            found = self._fastest(self.limit_bytes(share)) if self._starts_that_fit else None
            smaller = [one for at, one in self._stops.items() if at < share and one is not None]
            known = [one for one in (found, *smaller) if one is not None]
            self._stops[share] = min(known, key=self.preference, default=None)
        return self._stops[share]

    @cached_property
    def _stops(self) -> dict[float, TimedLayout | None]:
        return {}

    def stops(self) -> tuple[DialStop, ...]:
        """Return fast, balanced and fit; none where nothing fits."""
        found = {name: self.at(share) for name, share in sorted(STOPS.items(), key=itemgetter(1))}
        return tuple(
            DialStop(name=name, share=share, chosen=chosen)
            for name, share in STOPS.items()
            if (chosen := found[name]) is not None
        )

    def limit_bytes(self, share: float) -> int:
        """Return what the stop at `share` may take."""
        limits = self.search.limits
        limit = limits.device_bytes if self.rates.has_gpu else limits.host_bytes
        sizes = [self._size(self.search.need(one)) for one in self._starts_that_fit]
        most = max(sizes) if limit is None else limit
        return min(sizes) + int(share * (most - min(sizes)))

    def _size(self, need: Footprint) -> int:
        return need.device_bytes if self.rates.has_gpu else need.host_bytes

    @cached_property
    def timed(self) -> dict[Layout, TimedLayout]:
        """Return every layout that was timed."""
        return {}

    def time_of(self, layout: Layout) -> StepTime:
        """Return how long a step of `layout` takes, with what must live on disk there."""
        facts, clips, passes = self.search.facts, self.clips, self.passes
        layout = self.search.settled(layout)
        return step_time(facts, layout, self.rates, clips=clips, passes=passes)

    def _timed(self, layout: Layout) -> TimedLayout:
        if layout not in self.timed:
            need, time = self.search.need(layout), self.time_of(layout)
            self.timed[layout] = TimedLayout(layout=layout, need=need, time=time)
        return self.timed[layout]

    def preference(self, one: TimedLayout) -> tuple[float, float, int]:
        """Return the key by which layouts are compared, the smaller the better: seconds; then the
        hidden work of host memory and bus, which is never quite free; then bytes. Vocabulary
        chunks, deferred moments and more slots count only if clearly faster."""
        layout, step_s = one.layout, one.time.step_s
        if layout.head == "chunks":
            step_s *= CHUNKS_GAIN
        if layout.deferred_moments:
            step_s /= CLEARLY
        step_s /= WORTH_A_SLOT ** max(0, (layout.slots or 0) - FEWEST_SLOTS)
        return round(step_s, _DIGITS), round(one.time.carried_s, _DIGITS), one.size_bytes

    # -- where the search begins -------------------------------------------------------------------

    @cached_property
    def _starts_that_fit(self) -> list[Layout]:
        return [one for one in self._starts() if self.search.holds(self.search.need(one))]

    def _starts(self) -> Iterator[Layout]:
        """Yield the least layouts: each size of chunks, with inputs on device and host."""
        search, has_gpu = self.search, self.rates.has_gpu
        tokens = GPU_CHUNK_TOKENS if has_gpu else CHUNK_TOKENS
        heads = search.heads if has_gpu else search.heads[:1]
        for head, offload in product(heads, self._offloads()):
            for start in search.starts(head, tokens):
                every = replace(start, offload=offload, slots=self._fewest_slots(offload))
                least = search.least(every)[-1]
                yield least
                if self._inputs_may_move(least) and least.activations == "device":
                    yield replace(least, activations="host")

    def _offloads(self) -> tuple[Offload, ...]:
        request = self.search.request
        if request.offload != "auto":
            return (request.offload,)
        if not self.rates.has_gpu:
            return ("weights", "max")
        placed = request.resident_blocks != "auto" or request.device_groups != "auto"
        return ("weights",) if placed else ("weights", "none")

    def _fewest_slots(self, offload: Offload) -> int | None:
        if self.search.request.slots is not None:
            return self.search.request.slots
        return FEWEST_SLOTS if offload == "weights" and self.rates.has_gpu else None

    def _inputs_may_move(self, layout: Layout) -> bool:
        asked = self.search.request.activations != "auto" or layout.offload == "max"
        return self.rates.has_gpu and not asked

    # -- the search --------------------------------------------------------------------------------

    def _fastest(self, limit: int) -> TimedLayout:
        fits = [one for one in self._starts_that_fit
                if self._size(self.search.need(one)) <= limit]  # fmt: skip
        moments = (False, True) if self._chooses_moments else (None,)
        if self.near is not None and (begin := self._fitted(self._as_near(), limit)):
            near = self._filled(begin, limit)
            found = [self._improved(self._timed(self._seed(near, late)), limit)
                     for late in moments]  # fmt: skip
            return self._improved(min(found, key=self.preference), limit, flips=True)
        wide = [one for one in fits if one.chunk_rows == fits[0].chunk_rows]
        # each way to place inputs and head by itself: on the way between two, both may be slower
        seeds = {(one.offload, one.activations, one.head): one for one in reversed(wide)}
        found = [
            self._improved(self._timed(self._seed(one, late)), limit)
            for one in seeds.values()
            for late in moments
        ]
        best = min(found, key=self.preference)
        for one in self._other_chunks(best, fits):
            found.append(self._improved(self._timed(one), limit))
        best = min(found, key=self.preference)
        return self._improved(best, limit, flips=True)

    def _as_near(self) -> Layout:
        """Return the layout that was found with other rows, changed to this search's rows."""
        start = self._starts_that_fit[0]
        assert self.near is not None
        is_set = self.search.request.chunk_rows != "auto"
        chunk_rows = start.chunk_rows if is_set else min(start.chunk_rows, self.near.chunk_rows)
        return replace(
            self.near,
            batch_rows=start.batch_rows,
            chunk_rows=chunk_rows,
            embedding=start.embedding,
            head=self.near.head if self.near.head in self.search.heads else start.head,
            slots=start.slots if self.search.request.slots is not None else self.near.slots,
        )

    def _seed(self, layout: Layout, late: bool | None) -> Layout:
        """Return the start of one search; a head in vocabulary chunks may not live on the
        device."""
        if layout.head == "chunks" and self.search.request.device_first == "auto":
            layout = replace(layout, device_first="blocks")
        return layout if late is None else replace(layout, deferred_moments=late)

    def _other_chunks(self, best: TimedLayout, fits: list[Layout]) -> Iterator[Layout]:
        """Yield `best` with half as many rows in a chunk, and nothing on the device."""
        layout = best.layout
        for one in fits:
            if (one.activations, one.head) == (layout.activations, layout.head) and (
                one.offload == layout.offload and 2 * one.chunk_rows == layout.chunk_rows
            ):
                yield replace(
                    one,
                    device_first=layout.device_first,
                    deferred_moments=layout.deferred_moments,
                )

    @property
    def _chooses_moments(self) -> bool:
        asked = self.search.request.deferred_moments
        late = any(group.pass_bytes for group, _ in self.search.facts.blocks.alike)
        return self.rates.has_gpu and self.clips and asked is None and late

    def _improved(self, best: TimedLayout, limit: int, *, flips: bool = False) -> TimedLayout:
        """Move rows as long as the step gets shorter, many at a time, then fewer."""
        step = max(1, self.search.facts.layers // _FIRST_SHARE)
        while step:
            better = self._grown(best, limit, step)
            better = better or self._best_of(best, self._exchanged(best, limit, step))
            if better is None and flips:
                better = self._best_of(best, self._flipped(best, limit))
            if better is None:
                step //= 2
            else:
                best = better
        return best

    def _grown(self, best: TimedLayout, limit: int, step: int) -> TimedLayout | None:
        """Move the rows to the device that save the most seconds a byte; None where none saves
        any."""
        found = [self._timed(layout) for name in self._counts(best.layout)
                 if (layout := self._with(best.layout, name, step, limit)) is not None]  # fmt: skip
        better = [one for one in found if self.preference(one) < self.preference(best)]
        return min(better, key=lambda one: self._saved_per_byte(best, one), default=None)

    def _saved_per_byte(self, before: TimedLayout, one: TimedLayout) -> tuple[float, float]:
        """Return the seconds of the step, then of host and bus, that each added byte saves (as
        negative numbers)."""
        size = max(1, one.size_bytes - before.size_bytes)
        saved = (
            now - then
            for now, then in zip(self.preference(one), self.preference(before), strict=True)
        )
        return next(saved) / size, next(saved) / size

    def _best_of(self, best: TimedLayout, layouts: Iterable[Layout]) -> TimedLayout | None:
        """Return the best of `layouts`; None where none is better than `best`."""
        found = min((self._timed(one) for one in layouts), key=self.preference, default=None)
        return found if found and self.preference(found) < self.preference(best) else None

    def _exchanged(self, best: TimedLayout, limit: int, step: int) -> Iterator[Layout]:
        """Yield `best` with more rows of one kind on the device, and as many fewer of another."""
        counts = self._counts(best.layout)
        for name in counts:
            wanted = min(getattr(best.layout, name) + step, self._most(best.layout, name))
            grown = _changed(best.layout, {name: wanted})
            fitted = self._fitted(grown, limit, but=name)
            if fitted is not None:
                yield self._filled(fitted, limit)
        for come, gone in product(counts, counts):
            layout, held = best.layout, getattr(best.layout, gone)
            wanted = min(getattr(layout, come) + step, self._most(layout, come))
            if gone == come or not held or wanted == getattr(layout, come):
                continue
            least, most = 0, held - 1
            while least < most:
                middle = (least + most + 1) // 2
                if self._fits(_changed(layout, {come: wanted, gone: middle}), limit):
                    least = middle
                else:
                    most = middle - 1
            changed = self._bounded(_changed(layout, {come: wanted, gone: least}))
            if getattr(changed, come) == wanted and self._fits(changed, limit):
                yield self._filled(changed, limit)

    def _flipped(self, best: TimedLayout, limit: int) -> Iterator[Layout]:
        """Yield `best` with one setting changed, and more or less on the device to pay for it."""
        layout, request = best.layout, self.search.request
        changes: list[dict[str, Any]] = []
        if request.chunk_rows == "auto":
            chunks = {start.chunk_rows for start in self._starts_that_fit}
            near = (2 * layout.chunk_rows, layout.chunk_rows // 2)
            changes += [{"chunk_rows": rows} for rows in near if rows in chunks]
        if self.rates.has_gpu and request.device_first == "auto" and layout.device_groups:
            first = "blocks" if layout.device_first == "embedding" else "embedding"
            changes.append({"device_first": first})
        if self._chooses_moments:
            changes.append({"deferred_moments": not layout.deferred_moments})
        slots = layout.slots
        if slots is not None and request.slots is None and slot_count(self.search.facts, layout):
            near = (slots - 1, slots + 1)
            changes += [{"slots": n} for n in near if FEWEST_SLOTS <= n <= MOST_SLOTS]
        for change in changes:
            fitted = self._fitted(_changed(layout, change), limit)
            if fitted is not None:
                yield fitted
                yield self._filled(fitted, limit)

    # -- rows of the table by their numbers --------------------------------------------------------

    def _counts(self, layout: Layout) -> list[Count]:
        """Return the counts of a layout that may change."""
        request, found = self.search.request, list[Count]()
        if not self.rates.has_gpu:
            return found
        tried = self.rates.calibration
        if self.search.leaves_inputs_on_device(layout):
            found.append("activations_on_device")
        keeps = tried is not None and tried.kept_backward is not None
        if request.blocks_without_recompute == "auto" and keeps:
            found.append("blocks_without_recompute")
        if layout.offload == "weights":
            found += [name for name in ("resident_blocks", "device_groups")
                      if getattr(request, name) == "auto"]  # fmt: skip
        return found

    def _most(self, layout: Layout, name: Count) -> int:
        facts = self.search.facts
        if name == "device_groups":
            return len(facts.groups) - 1
        if name == "resident_blocks":
            return self.search.host_blocks(layout.device_groups, layout.device_first)
        if name == "blocks_without_recompute":
            return keepable_count(facts, layout)
        return offloading_blocks(facts, replace(layout, activations_on_device=0))

    def _bounded(self, layout: Layout) -> Layout:
        """Return the layout with counts reduced to a possible combination."""
        for name in reversed(COUNTS):
            held = getattr(layout, name)
            if held and held > (most := self._most(layout, name)):
                layout = _changed(layout, {name: most})
        return layout

    def _fits(self, layout: Layout, limit: int) -> bool:
        need = self.search.need(layout)
        return self._size(need) <= limit and self.search.holds(need)

    def _with(self, layout: Layout, name: Count, step: int, limit: int) -> Layout | None:
        """Return the layout with a count raised by up to `step`, as far as it fits; None where it
        does not."""
        held = getattr(layout, name)
        least, most = held, min(held + step, self._most(layout, name))

        def more(count: int) -> Layout:
            return self._bounded(_changed(layout, {name: count}))

        while least < most:
            middle = (least + most + 1) // 2
            if self._fits(more(middle), limit):
                least = middle
            else:
                most = middle - 1
        return more(least) if least > held else None

    def _fitted(self, layout: Layout, limit: int, but: Count | None = None) -> Layout | None:
        """Return the layout with fewer rows on the device until it fits; the count `but` keeps its
        value."""
        layout = self._bounded(layout)
        for name in COUNTS:
            if self._fits(layout, limit):
                return layout
            if name != but and name in self._counts(layout) and getattr(layout, name):
                none = _changed(layout, {name: 0})
                layout = self._with(none, name, getattr(layout, name), limit) or none
        return layout if self._fits(layout, limit) else None

    def _filled(self, layout: Layout, limit: int) -> Layout:
        """Return the layout with as much more on the device as fits, the largest first."""
        for name in reversed(self._counts(layout)):
            layout = self._with(layout, name, len(self.search.facts.groups), limit) or layout
        return layout


def _changed(layout: Layout, values: dict[Any, Any]) -> Layout:
    return Layout(**vars(layout) | values)  # `replace` took a sixth of a search
