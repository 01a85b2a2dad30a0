"""Plans in order of their hunger for device memory: fast, balanced, fit.

A dial from 1 (as fast as possible) to 0 (as little of the device as possible) is a limit: the
least that any layout of this batch takes, and that share of the room above it. Each stop is the
fastest predicted layout below its limit, searched among all layouts, so more room never makes a
stop slower. Without a GPU the limit is one of host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from fluxtrain.plan.choices.activations import left_on_device
from fluxtrain.plan.cost.moments import faster_of_both
from fluxtrain.plan.cost.prefetch import FEWEST_SLOTS, slots_for
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import Cost, LeastCost, cost, least_cost, passes_s
from fluxtrain.plan.facts import OFFLOADS, Offload
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    head_copied,
    keepable_count,
    kept_block_bytes,
)
from fluxtrain.plan.heads import CHUNKS_GAIN
from fluxtrain.plan.search import CHUNK_TOKENS, Search, tried_counts
from fluxtrain.plan.spread import DeviceFirst

STOPS = {"fast": 1.0, "balanced": 0.5, "fit": 0.0}
GPU_CHUNK_TOKENS = 16_384  # larger chunks use a GPU better still, if there is room for them
KEPT_STEPS = 4  # numbers of blocks that keep activations, tried beside block inputs that stay
RESIDENT_STEPS = 4  # numbers of resident blocks that are tried beside each number of groups
_DIGITS = 9  # of seconds: sums of the same in another order are equal

Preference = tuple[float, float, int, int, int]  # the smaller, the better


@dataclass(frozen=True, kw_only=True)
class FittingLayout:
    """A layout that fits, and what it takes."""

    layout: Layout
    need: Footprint
    has_gpu: bool

    @property
    def size_bytes(self) -> int:
        """Of the memory that the dial limits."""
        return self.need.device_bytes if self.has_gpu else self.need.host_bytes


@dataclass(frozen=True, kw_only=True)
class TimedLayout(FittingLayout):
    """With how long a step is."""

    cost: Cost


@dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """One stop of the dial."""

    name: str
    share: float  # of the room between the least that runs and all there is
    limit_bytes: int
    chosen: TimedLayout


@dataclass(frozen=True)
class Frontier:
    """Every layout of a batch that fits, timed where it may be the fastest;
    `search.request.batch_rows` must be set."""

    search: Search
    rates: Rates
    clips: bool = True
    passes: int = 1

    @cached_property
    def candidates(self) -> tuple[FittingLayout, ...]:
        """Those that fit within the limits of the rule."""
        found: list[FittingLayout] = []
        for layout in self._layouts():
            held = self._held(layout)
            found += held
            found += [one for _ in held for deeper in self._deeper(layout)
                      for one in self._held(deeper)]  # fmt: skip
        return tuple(found)

    def _held(self, layout: Layout) -> list[FittingLayout]:
        need = self.search.need(layout)
        return [self._fitting(layout, need)] if self.search.holds(need) else []

    def _fitting(self, layout: Layout, need: Footprint) -> FittingLayout:
        return FittingLayout(layout=layout, need=need, has_gpu=self.rates.has_gpu)

    def fastest(self, some: Iterable[FittingLayout]) -> TimedLayout:
        """The fastest of `some`; of equals the one that leaves host memory and bus alone most, for
        what they carry is never quite free; then the smallest. Not all are timed: those which
        cannot be better than another one are left out."""
        best: TimedLayout | None = None
        for least, one in sorted(((self._least(one), one) for one in some), key=lambda it: it[0]):
            if best is not None and least >= self._preference(best, best.cost):
                break
            timed = self._timed(one)
            if best is None or self._preference(timed, timed.cost) < self._preference(
                best, best.cost
            ):
                best = timed
        assert best is not None, "the fastest of nothing"
        return best

    def _timed(self, one: FittingLayout) -> TimedLayout:
        known = self._known.get(one.layout)
        if known is None:
            if self._chooses_moments:
                layout, found = faster_of_both(one.layout, self.cost_of)
            else:
                layout, found = one.layout, self.cost_of(one.layout)
            known = TimedLayout(layout=layout, need=one.need, cost=found, has_gpu=one.has_gpu)
            self._known[one.layout] = known
        return known

    @cached_property
    def _known(self) -> dict[Layout, TimedLayout]:
        return {}

    @property
    def _chooses_moments(self) -> bool:
        asked = self.search.request.deferred_moments
        return asked is None and self.rates.has_gpu and self.clips

    def _least(self, one: FittingLayout) -> Preference:
        """What `_preference` says of it at least, with the moments at the better time."""
        known = self._bounds.get(one.layout)
        if known is None:
            known = self._bounds[one.layout] = least_cost(
                self.search.facts,
                one.layout,
                self.rates,
                clips=self.clips,
                passes=self.passes,
                moments_free=self._chooses_moments,
            )
        return self._preference(one, known)

    def _preference(self, one: FittingLayout, took: Cost | LeastCost) -> Preference:
        """InputsOn that stay count where they make the step shorter, and else last: what is left
        is theirs, and no slot of weights is given up for copies that are hidden."""
        layout, row = one.layout, self.search.facts.row
        step_s = took.step_s * (CHUNKS_GAIN if layout.head == "chunks" else 1.0)
        staying = layout.activations_on_device
        spared_s = 0.0
        if staying and row is not None and self.rates.has_gpu:
            spared_bytes = layout.passes * staying * layout.batch_rows * row.block_input_bytes
            spared_s = spared_bytes / self.rates.up_both + spared_bytes / self.rates.down
        return (
            round(step_s, _DIGITS),
            round(took.carried_s + spared_s, _DIGITS),
            OFFLOADS.index(layout.offload),
            -staying,
            one.size_bytes,
        )

    @cached_property
    def _bounds(self) -> dict[Layout, LeastCost]:
        return {}

    def cost_of(self, layout: Layout) -> Cost:
        """What a step of `layout` takes."""
        facts, clips, passes = self.search.facts, self.clips, self.passes
        return cost(facts, layout, self.rates, clips=clips, passes=passes)

    def limit_bytes(self, share: float) -> int:
        """What the stop at `share` may take."""
        limits = self.search.limits
        room = limits.device_bytes if self.rates.has_gpu else limits.host_bytes
        sizes = [candidate.size_bytes for candidate in self.candidates]
        most = max(sizes) if room is None else room
        return min(sizes) + int(share * (most - min(sizes)))

    def at(self, share: float) -> TimedLayout:
        """The fastest layout within the limit."""
        return self.fastest(self.within(share))

    def within(self, share: float) -> list[FittingLayout]:
        """The layouts of the stop at `share`, each with what its limit has room for beside it:
        blocks that keep their activations, or block inputs that stay (`_filled`)."""
        limit = self.limit_bytes(share)
        if limit not in self._within:
            fitting = (one for one in self.candidates if one.size_bytes <= limit)
            self._within[limit] = list(
                chain.from_iterable(self._filled(one, limit) for one in fitting)
            )
        return self._within[limit]

    @cached_property
    def _within(self) -> dict[int, list[FittingLayout]]:
        return {}

    def _filled(self, one: FittingLayout, limit: int) -> Iterator[FittingLayout]:
        """With as many blocks that keep their activations as fit; and, where block inputs wait on
        the host, with numbers of such blocks that do not depend on the limit and as many inputs on
        the device as fit beside them. So whatever a smaller limit has room for, a larger one has
        at least as much of, and is no slower."""
        keeping = self._keeping(one, limit)
        yield keeping
        if not self.search.leaves_inputs_on_device(one.layout):
            return
        facts = self.search.facts
        most, counts = (
            keeping.layout.blocks_without_recompute,
            {one.layout.blocks_without_recompute},
        )
        if keeping is not one:
            every = keepable_count(facts, one.layout)
            counts |= {every * step // KEPT_STEPS for step in range(KEPT_STEPS + 1)}
        for count in sorted(count for count in counts if count <= most):
            kept = replace(one.layout, blocks_without_recompute=count)
            layout = left_on_device(facts, kept, limit)
            if layout.activations_on_device:
                yield self._fitting(layout, self.search.need(layout))

    def _keeping(self, one: FittingLayout, limit: int) -> FittingLayout:
        facts, tried = self.search.facts, self.rates.calibration
        asked = self.search.request.blocks_without_recompute != "auto"
        if asked or not self.rates.has_gpu or tried is None or tried.kept_backward is None:
            return one
        every, size = keepable_count(facts, one.layout), kept_block_bytes(facts, one.layout)
        for count in (every, min(every, (limit - one.size_bytes) // max(1, size))):
            layout = replace(one.layout, blocks_without_recompute=count)
            if count and (need := self.search.need(layout)).device_bytes <= limit:
                return self._fitting(layout, need)
        return one

    def plans(self) -> tuple[RankedPlan, ...]:
        """Fast, balanced and fit; none where nothing fits."""
        if not self.candidates:
            return ()
        return tuple(
            RankedPlan(
                name=name, share=share, limit_bytes=self.limit_bytes(share), chosen=self.at(share)
            )
            for name, share in STOPS.items()
        )

    def _layouts(self) -> Iterator[Layout]:
        search = self.search
        every = len(search.facts.groups)
        for start in self._starts():
            for offload in self._offloads():
                whole = replace(start, offload=offload, slots=self._fewest(offload))
                if offload == "max" and start.activations == "host":
                    continue  # as without saying so
                if offload == "none":
                    yield from self._unrepeated(replace(whole, device_groups=every))
                    continue
                for count, first in self._device_groups(offload):
                    placed = replace(whole, device_groups=count, device_first=first)
                    for unrepeated in self._unrepeated(placed):
                        for resident in self._residents(placed):
                            yield replace(unrepeated, resident_blocks=resident)

    def _fewest(self, offload: Offload) -> int | None:
        """Slots of a layout that may have more where that pays: `max` has the fewest alone."""
        if self.search.request.slots is not None:
            return self.search.request.slots
        return FEWEST_SLOTS if offload == "weights" and self.rates.has_gpu else None

    def _deeper(self, layout: Layout) -> Iterator[Layout]:
        """With more slots, up to those that hide its copies."""
        if layout.slots is None or self.search.request.slots is not None:
            return
        forward_s, _, backward_s = passes_s(self.search.facts, layout, self.rates)
        wanted = slots_for(self.search.facts, layout, self.rates, forward_s, backward_s)
        for slots in range(FEWEST_SLOTS + 1, wanted + 1):
            yield replace(layout, slots=slots)

    def _starts(self) -> Iterator[Layout]:
        """Batches and chunks; on a GPU also with the block inputs on the host."""
        tokens = GPU_CHUNK_TOKENS if self.rates.has_gpu else CHUNK_TOKENS
        heads = self.search.heads if self.rates.has_gpu else self.search.heads[:1]
        for start in chain.from_iterable(self.search.starts(head, tokens) for head in heads):
            yield start
            if self.rates.has_gpu and self.search.request.activations == "auto":
                yield replace(start, activations="host")

    def _unrepeated(self, layout: Layout) -> Iterator[Layout]:
        """The layout, unless it is that of a whole head, which lives on the device."""
        compared = "chunks" in self.search.heads[1:] and layout.head == "chunks"
        if not compared or head_copied(self.search.facts, layout) == "chunks":
            yield layout

    def _offloads(self) -> tuple[Offload, ...]:
        request = self.search.request
        if request.offload != "auto":
            return (request.offload,)
        placed = request.resident_blocks != "auto" or request.device_groups != "auto"
        whole = self.rates.has_gpu and not placed
        return ("none", "weights", "max") if whole else ("weights", "max")

    def _group_counts(self, offload: Offload) -> Iterable[int]:
        every, asked = len(self.search.facts.groups), self.search.request.device_groups
        if asked != "auto":
            return (min(asked, every),)
        streams = self.rates.has_gpu and offload != "optimizer"
        return tried_counts(every - 1) if streams else (0,)

    def _device_groups(self, offload: Offload) -> Iterator[tuple[int, DeviceFirst]]:
        asked = self.search.request.device_first
        for count in self._group_counts(offload):
            yield count, "embedding" if asked == "auto" else asked
            if asked == "auto" and self.rates.has_gpu and 0 < count < len(self.search.facts.groups):
                yield count, "blocks"

    def _residents(self, layout: Layout) -> list[int]:
        offload = layout.offload
        blocks = self.search.host_blocks(layout.device_groups, layout.device_first)
        asked = self.search.request.resident_blocks
        if offload == "optimizer":
            return [blocks]
        if asked != "auto":
            return [min(asked, blocks)]
        if not self.rates.has_gpu or offload == "max":
            return [0]
        return sorted({blocks * step // RESIDENT_STEPS for step in range(RESIDENT_STEPS + 1)})
