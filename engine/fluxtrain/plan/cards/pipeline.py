"""Simulate a step that flows through several cards: list scheduling. Pure arithmetic.

    found = simulated(step_work(dealt, layouts, rates), rates)

Chunks of rows go through the blocks, block by block, also of neighbours on one card (a run), which
could go chunk by chunk. Each card has a compute queue and two copy lanes, up and down. One thread
of the host queues the work of all cards, and one server runs AdamW in forward order, for the next
step's forward pass, which waits for it block by block; deferred moments come after all weights, of
several cards when the forward pass is queued, and the backward pass waits for those. A chunk
changes cards by a link of their own, or by the bus of both.

Steps repeat until they are alike; then one takes as long as the distance between two. Host memory
is a floor: a step is no shorter than what it moves there needs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from fluxtrain.plan.cards.dealing import runs_of
from fluxtrain.plan.cards.lanes import Lanes
from fluxtrain.plan.cards.rates import CardsRates
from fluxtrain.plan.cards.shares import EDGES_CARD
from fluxtrain.plan.cards.work import GroupWork, StepWork

STEPS = 5  # the first fill the pipeline
_STEADY = 2  # of the last steps are averaged


@dataclass(frozen=True, kw_only=True)
class PipelineTime:
    """One of many steps."""

    step_s: float
    tokens: int
    busy_s: dict[str, float] = field(default_factory=dict)  # of the busiest of each kind

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.step_s

    @property
    def binds(self) -> str:
        """The resource that is busy for the most of a step."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


def simulated(work: StepWork, rates: CardsRates, *, runs_by_chunks: bool = False) -> PipelineTime:
    """Return how long a step takes once many have gone before.

    `runs_by_chunks`: neighbouring blocks on one card go chunk by chunk, else block by block. Of one
    card they always go block by block, and of packed weights.
    """
    pipeline = _Pipeline(work, rates, by_chunks=runs_by_chunks and work.cards > 1)
    ends_s = [pipeline.step() for _ in range(STEPS)]
    step_s = (ends_s[-1] - ends_s[-1 - _STEADY]) / _STEADY
    busy_s = {name: seconds / STEPS for name, seconds in pipeline.busy_s().items()}
    if work.cards > 1 and rates.host_bytes_per_s is not None:
        moved = work.host_bytes + pipeline.lanes.through_host_bytes / STEPS
        busy_s["host memory"] = moved / rates.host_bytes_per_s
        step_s = max(step_s, busy_s["host memory"])
    return PipelineTime(step_s=step_s, tokens=work.tokens, busy_s=busy_s)


@dataclass
class _Use:
    """A block in a shared slot: when its computation begins and ends."""

    begin_s: float | None = None
    end_s: float | None = None


class _Pipeline:
    """The clocks of a machine whose cards train step after step."""

    def __init__(self, work: StepWork, rates: CardsRates, *, by_chunks: bool) -> None:
        self.work, self.by_chunks = work, by_chunks
        self.lanes = Lanes(work.cards, rates)
        self.blocks = [at for at, group in enumerate(work.groups) if group.kind == "block"]
        self.runs = runs_of([work.groups[at].card for at in self.blocks])
        self.compute_s = [0.0] * work.cards
        self.computed_s = [0.0] * work.cards  # of that, busy
        self.thread_s = self.queued_s = 0.0
        self.adamw_s = self.updating_s = 0.0
        self.updated_s = [0.0] * len(work.groups)  # when the weights of a group are
        self.moments_s = [0.0] * len(work.groups)
        self.moments_left: list[int] = []  # groups whose moments of the step before are to come
        self.arrived_s = [0.0] * len(work.groups)  # gradients on the host
        self.uses: dict[int, list[_Use]] = defaultdict(list)  # of the slots of each card
        self.staged_s: dict[tuple[int, float], list[float]] = defaultdict(list)
        self.lent_s: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.asked_s = 0.0  # when the step's first uploads are asked for

    def busy_s(self) -> dict[str, float]:
        """Seconds in which each kind of resource was busy so far, of cards the busiest."""
        return {
            "compute": max(self.computed_s),
            "uploads": max(self.lanes.busy_s["up"]),
            "downloads": max(self.lanes.busy_s["down"]),
            "update": self.updating_s,
            "queueing": self.queued_s,
        }

    def step(self) -> float:
        """Run one optimizer step; return when its last computation ends."""
        for number in range(self.work.passes):
            chunks_s = self._forward(first=number == 0)
            self._backward(self._head(chunks_s, first=number == 0), number)
        return self._optimizer()

    def _compute(self, card: int, ready_s: float, seconds: float) -> tuple[float, float]:
        begin_s = max(self.compute_s[card], ready_s)
        self.compute_s[card] = begin_s + seconds
        self.computed_s[card] += seconds
        return begin_s, self.compute_s[card]

    def _queue(self, alone_s: float, beside_s: float, after_s: float = 0.0) -> float:
        """The thread queues something, not before `after_s`, more slowly while AdamW runs."""
        self.thread_s = max(self.thread_s, after_s)
        seconds = max(alone_s, beside_s) if self.thread_s < self.adamw_s else alone_s
        self.thread_s += seconds
        self.queued_s += seconds
        return self.thread_s

    def _upload(self, at: int, seconds: float, after_s: float) -> float:
        """Copy weights up as soon as they are updated, asked for, and have a slot."""
        if not seconds:
            return after_s
        group = self.work.groups[at]
        asked_s = self.asked_s
        if group.streams:
            uses, slots = self.uses[group.card], self.work.slots[group.card]
            ahead = max(1, slots - 1)
            if len(uses) >= ahead:
                asked_s = max(asked_s, uses[-ahead].begin_s or 0.0)
            if len(uses) >= slots:
                asked_s = max(asked_s, uses[-slots].end_s or 0.0)
        return self.lanes.copy("up", group.card, max(asked_s, after_s), seconds)

    def _items(self, *, backward: bool) -> list[tuple[int, int]]:
        """(block, chunk) in the order in which they are queued."""
        found: list[tuple[int, int]] = []
        chunks = range(self.work.chunks)
        for run in reversed(self.runs) if backward else self.runs:
            blocks = list(run)[::-1] if backward else list(run)
            if self.by_chunks:
                found += [(block, chunk) for chunk in chunks for block in blocks]
            else:
                found += [(block, chunk) for block in blocks for chunk in chunks]
        return found

    def _flow(self, chunks_s: list[float], here: int, *, backward: bool, number: int) -> int:
        """Let all chunks, ready at `chunks_s` on card `here`, go through the blocks; return the
        card where they are then."""
        where, weights_s = [here] * self.work.chunks, [0.0] * len(self.blocks)
        uses = [_Use() for _ in self.blocks]
        last = self.work.chunks - 1
        for block, chunk in self._items(backward=backward):
            at = self.blocks[block]
            group = self.work.groups[at]
            if chunk == 0:
                weights_s[block] = self._weights(at, backward=backward, number=number)
            queued_s = self._queued(at, chunk, last, backward=backward, number=number)
            size = self.work.hop_bytes[chunk]
            ready_s = self.lanes.hop(where[chunk], group.card, chunks_s[chunk], size)
            where[chunk] = group.card
            if backward and chunk == last:
                ready_s = max(ready_s, self._staging_free(group))
            seconds = (group.backward_s if backward else group.forward_s)[chunk]
            ready_s = max(ready_s, queued_s, weights_s[block])
            begin_s, end_s = self._compute(group.card, ready_s, seconds)
            chunks_s[chunk] = end_s
            if chunk == 0 and group.streams:
                uses[block].begin_s = begin_s
                self.uses[group.card].append(uses[block])
            if chunk == last:
                uses[block].end_s = end_s
                self._computed(at, end_s, backward=backward, number=number)
        return where[0]

    def _weights(self, at: int, *, backward: bool, number: int) -> float:
        """When a block's weights, and in the backward pass what waits on the host, are there."""
        group = self.work.groups[at]
        if not backward:
            first = number == 0
            seconds = group.up_forward_s if first or group.streams else 0.0
            return self._upload(at, seconds, self.updated_s[at] if first else 0.0)
        sums = group.up_sums_s[number - 1] if number and group.up_sums_s else 0.0
        there = group.streams and self._is_last_streamed(at)  # in the slot of its forward
        seconds = sums + (0.0 if there else group.up_backward_s)
        return self._upload(at, seconds, 0.0)

    def _is_last_streamed(self, at: int) -> bool:
        card = self.work.groups[at].card
        after = self.work.groups[at + 1 :]
        return not any(group.streams and group.card == card for group in after)

    def _queued(self, at: int, chunk: int, last: int, *, backward: bool, number: int) -> float:
        """When the host has queued a chunk of a block. It waits for the update of a block that it
        uploads, and for what the block's gradients will overwrite."""
        times = self.work.queueing
        if not backward:
            waits_s = self.updated_s[at] if chunk == 0 and number == 0 else 0.0
            alone, beside, is_once = times.forward, times.forward_beside, chunk == 0
        else:
            waits_s = self._lent_free(self.work.groups[at]) if chunk == last else 0.0
            alone = times.backward if self.work.clips else times.backward_beside
            beside, is_once = times.backward_beside, chunk == last
        alone_s, beside_s = (line.slope + is_once * line.base for line in (alone, beside))
        return self._queue(alone_s, beside_s, waits_s)

    def _computed(self, at: int, end_s: float, *, backward: bool, number: int) -> None:
        """Download what a block leaves: inputs that wait on the host, or its gradients."""
        group = self.work.groups[at]
        if backward:
            self._download(at, end_s, number)
        elif group.down_input_s:
            self.lanes.copy("down", group.card, end_s, group.down_input_s)

    def _download(self, at: int, ready_s: float, number: int) -> None:
        """Send the gradients of a group to the host once its moments are done."""
        group = self.work.groups[at]
        seconds = group.down_s[min(number, len(group.down_s) - 1)]
        if not seconds:
            return
        if number == 0 and group.moments_s:
            self.thread_s = max(self.thread_s, self.moments_s[at])
            ready_s = max(ready_s, self.moments_s[at])
        self.arrived_s[at] = self.lanes.copy("down", group.card, ready_s, seconds)
        self.staged_s[group.card, seconds].append(self.arrived_s[at])
        if not self.work.clips:
            self._update(at, self.arrived_s[at])
            self.lent_s[group.ring].append(self.updated_s[at])

    def _staging_free(self, group: GroupWork) -> float:
        staged = self.staged_s[group.card, group.down_s[0]]
        return staged[-group.staging] if len(staged) >= group.staging else 0.0

    def _lent_free(self, group: GroupWork) -> float:
        lent, depth = self.lent_s[group.ring], group.ring[1]
        return lent[-depth] if not self.work.clips and len(lent) >= depth else 0.0

    def _update(self, at: int, ready_s: float) -> None:
        """AdamW of one group, after those before it."""
        self.adamw_s = max(self.adamw_s, ready_s) + self.work.groups[at].update_s
        self.updating_s += self.work.groups[at].update_s
        self.updated_s[at] = self.adamw_s

    def _forward(self, *, first: bool) -> tuple[list[float], int]:
        """All chunks through all blocks; return when each is ready, and on which card."""
        ready_s = 0.0
        if first:
            self.asked_s = self.thread_s
            for at in self._edges("start"):
                group = self.work.groups[at]
                copied_s = self._upload(at, group.up_forward_s, self.updated_s[at])
                ready_s = max(ready_s, copied_s)
        chunks_s = [max(ready_s, self.compute_s[EDGES_CARD])] * self.work.chunks
        here = self._flow(chunks_s, EDGES_CARD, backward=False, number=0 if first else 1)
        self._update_moments()
        return chunks_s, here

    def _edges(self, kind: str) -> list[int]:
        return [at for at, group in enumerate(self.work.groups) if group.kind == kind]

    def _head(self, flowed: tuple[list[float], int], *, first: bool) -> tuple[list[float], int]:
        """The loss and its gradient, when all chunks are there; return when each chunk's gradient
        is ready, and where."""
        chunks_s, here = flowed
        ready_s = self._queue(self.work.queueing.outside_s, 0.0)
        for at in self._edges("head"):
            seconds = self.work.groups[at].up_forward_s * first
            ready_s = max(ready_s, self._upload(at, seconds, self.updated_s[at]))
        loss_s, begun_s, ends_s = 0.0, 0.0, [0.0]
        for card, seconds in enumerate(self.work.head_s):
            if not seconds:
                continue
            share = seconds / sum(self.work.head_s)
            hops = zip(chunks_s, self.work.hop_bytes, strict=True)
            there_s = max(self.lanes.hop(here, card, at_s, int(share * n)) for at_s, n in hops)
            if card != EDGES_CARD and first:
                copied = self.lanes.hop(EDGES_CARD, card, ready_s, self.work.head_copy_bytes)
                there_s = max(there_s, copied)
            if self.work.head_up_s:  # beside the computation
                copied_s = self.lanes.copy("up", card, there_s, self.work.head_up_s)
                there_s = max(there_s, copied_s - seconds)
            begin_s, end_s = self._compute(card, max(ready_s, there_s), seconds)
            begun_s = max(begun_s, begin_s)
            if self.work.slope_bytes and card != EDGES_CARD:  # chunk by chunk, the last at its end
                size = self.work.slope_bytes[card]
                last = min(size, sum(self.work.slope_bytes) // self.work.head_chunks)
                ends_s.append(self.lanes.hop(card, EDGES_CARD, begin_s, size - last))
                ends_s.append(self.lanes.hop(card, EDGES_CARD, end_s, last))
            if card != EDGES_CARD:
                self.lanes.hop(card, EDGES_CARD, end_s, self.work.head_sum_bytes)
                back_bytes = int(share * sum(self.work.hop_bytes))
                end_s = self.lanes.hop(card, EDGES_CARD, end_s, back_bytes)
            loss_s = max(loss_s, end_s)
        if self.work.head_adds_s:  # chunk by chunk, while others are computed
            _, end_s = self._compute(EDGES_CARD, begun_s, self.work.head_adds_s)
            last_s = self.work.head_adds_s / self.work.head_chunks
            loss_s = max(loss_s, end_s, max(ends_s) + last_s)
        return [loss_s] * self.work.chunks, EDGES_CARD

    def _backward(self, flowed: tuple[list[float], int], number: int) -> None:
        """All chunks back through all blocks."""
        chunks_s, here = flowed
        for at in self._edges("head"):
            self._download(at, chunks_s[0], number)
        if self.work.behind_head_s:
            self._compute(EDGES_CARD, chunks_s[0], self.work.behind_head_s)
        here = self._flow(chunks_s, here, backward=True, number=number)
        hops = zip(chunks_s, self.work.hop_bytes, strict=True)
        back_s = max(self.lanes.hop(here, EDGES_CARD, at_s, size) for at_s, size in hops)
        for at in self._edges("start"):
            self._download(at, back_s, number)

    def _optimizer(self) -> float:
        """The end of a step: updates on the cards, and AdamW on the host beside the next one."""
        work = self.work
        self._queue(work.queueing.optimizer_s, 0.0)
        computed_s = max(self.compute_s)
        if not work.clips:
            for card, seconds in enumerate(work.device_update_s):
                self._compute(card, 0.0, seconds)
            return max(self.compute_s)
        for card, seconds in enumerate(work.device_update_s):
            self._compute(card, computed_s, seconds)
        ready_s = max(computed_s, self.thread_s)
        on_host = [at for at, group in enumerate(work.groups) if group.update_s]
        for at in on_host:
            self._update(at, max(ready_s, self.arrived_s[at]))
        self.moments_left = [at for at in reversed(on_host) if work.groups[at].moments_s]
        self.updating_s += sum(work.groups[at].moments_s for at in on_host)
        if work.cards == 1:
            self._update_moments()
        return max(self.compute_s)

    def _update_moments(self) -> None:
        """The moments that are left of the step before: of several cards once the blocks'
        forward pass is queued."""
        if self.work.cards > 1:
            self.adamw_s = max(self.adamw_s, self.thread_s)
        for at in self.moments_left:
            self.adamw_s += self.work.groups[at].moments_s
            self.moments_s[at] = self.adamw_s
        self.moments_left = []
