"""How long a step takes: a simulation of one or several cards by list scheduling. Pure arithmetic.

    found = step_time(facts, layout, rates)                       one card
    found = simulated(step_work(dealt, layouts, rates), rates)    any number

Chunks of rows go through the blocks, block by block, also those of neighbours on one card (a run),
which could go chunk by chunk. Each card has a compute queue and copy lanes up and down. One thread
of the host queues the work of all cards, and one server runs AdamW in forward order for the next
step's forward pass, which waits for it block by block. Deferred moments come after all weights,
with several cards once the next forward pass is queued; the first backward pass of the step waits
for them where it would overwrite the gradients that they read. A chunk changes cards by a link of
their own, or by the bus of both.

With `n` slots a streamed block's copy begins when the block `n - 1` streamed ones before it begins
to compute: then the slot is free, and the copy is asked for. Steps repeat until they are alike;
then one takes as long as the distance between two. Host memory is a floor: a step is no shorter
than what it moves there needs. Without a GPU the same cores do everything, so nothing overlaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fluxtrain.plan.dealing import EDGES_CARD, Assignment, runs_of
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import CardsRates, Rates
from fluxtrain.plan.work import GroupWork, StepWork, step_work

LANES = ("uploads", "downloads")  # of each card
STEPS = 5  # at most: the first fill the pipeline
ALIKE = 1e-4  # of a step: two that differ by less are alike
_STEADY = 2  # of the last steps are averaged
COMMUNICATION = "communication"  # of a sharded model
_BINDS = {
    "compute": "the GPU",
    "uploads": "copies of weights to the GPU",
    "downloads": "copies of gradients to the host",
    "disk": "reads of weights from disk",
    "update": "AdamW on the host",
    "queueing": "the processor that drives the GPU",
    "host memory": "AdamW and copies in host memory",
    COMMUNICATION: "communication between the ranks",
}
_BINDS_HERE = {"compute": "the processor", "update": "AdamW on the host"}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long one of many steps takes."""

    step_s: float
    busy_s: Mapping[str, float]  # by resource, of those that each card has the busiest
    phases_s: Mapping[str, float]  # with a GPU: forward and backward with what they wait for
    work: StepWork
    has_gpu: bool = True

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput."""
        return self.work.tokens / self.step_s

    @property
    def parts_s(self) -> dict[str, float]:
        """Return seconds by kind of work, overlapping or not; of several cards also by resource."""
        busy_s = self.busy_s if self.work.cards > 1 else {}
        return {**self.work.parts_s(), **self.phases_s, **busy_s}

    @property
    def carried_s(self) -> float:
        """Return the seconds of host memory and bus for the step, hidden or not."""
        return sum(self.busy_s[name] for name in (*LANES, "update"))

    @property
    def busiest(self) -> str:
        """Return the resource that is busy for most of a step."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    @property
    def binds(self) -> str:
        """Return people's name for the resource that is busy for most of a step."""
        if not self.has_gpu and self.busiest != "disk":
            return _BINDS_HERE.get(self.busiest, "copies in host memory")
        words = _BINDS[self.busiest]
        if self.busiest == "disk" and self.parts_s["disk_states"] > self.parts_s["disk_read"]:
            words = "optimizer states on disk"
        return words.replace("the GPU", "the GPUs") if self.work.cards > 1 else words


def step_time(
    facts: ModelFacts, layout: Layout, rates: Rates, *, clips: bool = True, passes: int = 1
) -> StepTime:
    """Return how long a step of `passes` batches takes on one card; `clips`: updates wait for the
    norm of all gradients."""
    alone = Assignment(facts=facts, cards=(EDGES_CARD,) * facts.layers)
    cards = CardsRates(cards=(rates,))
    return simulated(step_work(alone, [layout], cards, clips=clips, passes=passes), cards)


def simulated(work: StepWork, rates: CardsRates, *, runs_by_chunks: bool = False) -> StepTime:
    """Return the seconds of a step after many others. `runs_by_chunks`: several neighbouring
    blocks on one card are computed chunk by chunk, else block by block. On a single card, and with
    packed weights, always block by block."""
    if not rates.cards[0].has_gpu:
        return _without_gpu(work)
    clocks = _Clocks(work, rates, by_chunks=runs_by_chunks and work.cards > 1)
    ends_s = [0.0]
    for _ in range(STEPS):
        ends_s.append(clocks.step())
        if len(ends_s) > _STEADY + 1:
            last_s, before_s = ends_s[-1] - ends_s[-2], ends_s[-2] - ends_s[-3]
            if abs(last_s - before_s) <= ALIKE * last_s:
                break
    steps = len(ends_s) - 1
    step_s = (ends_s[-1] - ends_s[-1 - _STEADY]) / _STEADY
    busy_s = {name: seconds / steps for name, seconds in clocks.busy_s().items()}
    if work.cards > 1 and rates.host_bytes_per_s is not None:
        moved = work.host_bytes + clocks.through_host_bytes / steps
        busy_s["host memory"] = moved / rates.host_bytes_per_s
    # few steps are simulated: a queue that nobody waits for in them may still grow with each
    step_s = max(step_s, *busy_s.values())
    return StepTime(step_s=step_s, busy_s=busy_s, phases_s=clocks.phases_s, work=work)


def _without_gpu(work: StepWork) -> StepTime:
    """Add everything up: the same cores compute, copy and update."""
    parts_s = work.parts_s()
    compute = ("forward", "head", "backward", "device_update")
    busy_s = {
        "compute": sum(parts_s[name] for name in compute),
        "uploads": sum(parts_s[name] for name in ("upload_forward", "upload_backward")),
        "downloads": parts_s["download"] + parts_s["beside_bytes"],
        "update": parts_s["host_update"] + parts_s["deferred_moments"],
        "disk": parts_s["disk_read"] + parts_s["disk_states"],
    }
    phases_s = {"forward_phase": 0.0, "backward_phase": 0.0}
    step_s = sum(busy_s.values())
    return StepTime(step_s=step_s, busy_s=busy_s, phases_s=phases_s, work=work, has_gpu=False)


class _Use:
    """One block's use of a shared slot: when its computation begins and ends."""

    __slots__ = ("begin_s", "end_s")

    def __init__(self) -> None:
        self.begin_s = self.end_s = 0.0


class _Clocks:
    """The clocks of a machine whose cards train step after step."""

    def __init__(self, work: StepWork, rates: CardsRates, *, by_chunks: bool) -> None:
        self.work = work
        self._rates = rates
        self.groups, self.chunks = work.groups, work.chunks
        self.blocks = [at for at, group in enumerate(work.groups) if group.kind == "block"]
        self.starts = [at for at, group in enumerate(work.groups) if group.kind == "start"]
        self.heads = [at for at, group in enumerate(work.groups) if group.kind == "head"]
        self._head_uploads = [(at, self.groups[at].up_head_s) for at in self.starts]
        self._head_uploads += [(at, self.groups[at].up_forward_s) for at in self.heads]
        runs = runs_of([work.groups[at].card for at in self.blocks])
        self._forward_items = self._items(runs, by_chunks)
        backwards = [run[::-1] for run in runs[::-1]]
        self._backward_items = self._items(backwards, by_chunks)
        self._last_streamed = {
            group.card: at for at, group in enumerate(work.groups) if group.streams
        }
        lanes = len(LANES) * work.cards  # lane `at` of card `c` is number `len(LANES) * c + at`
        self.lanes_s, self.lanes_busy_s = [0.0] * lanes, [0.0] * lanes
        self.links_s: dict[tuple[int, int], float] = {}
        self.through_host_bytes = 0.0  # written there and read there
        self.disk_s = self.disk_busy_s = 0.0  # of the one disk that all cards read
        self.compute_s = [0.0] * work.cards
        self.computed_s = [0.0] * work.cards  # of that, busy
        self.thread_s = self.queued_s = 0.0
        self.adamw_s = self.updating_s = 0.0
        self.updated_s = [0.0] * len(work.groups)  # when the weights of a group are
        self.moments_s = [0.0] * len(work.groups)
        self.moments_left: list[int] = []  # groups whose moments of the step before are to come
        self.arrived_s = [0.0] * len(work.groups)  # gradients on the host
        self.exchange_s = [0.0] * work.cards  # those of other processes are added
        self.added_s = 0.0  # the same on the host
        self.uses: list[list[_Use]] = [[] for _ in range(work.cards)]  # of the slots of each card
        self.staged_s: dict[tuple[int, float], list[float]] = defaultdict(list)
        self.lent_s: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.asked_s = 0.0  # when the step's first uploads are asked for
        self.phases_s = {"forward_phase": 0.0, "backward_phase": 0.0}  # of the last step

    def _items(self, runs: list[range], by_chunks: bool) -> list[tuple[int, int]]:
        """Return (group, chunk) in the order in which they are queued."""
        chunks, found = range(self.chunks), []
        for run in runs:
            groups = [self.blocks[block] for block in run]
            if by_chunks:
                found += [(at, chunk) for chunk in chunks for at in groups]
            else:
                found += [(at, chunk) for at in groups for chunk in chunks]
        return found

    def busy_s(self) -> dict[str, float]:
        """Return the seconds in which each resource was busy so far, of cards the busiest."""
        lanes = {name: max(self.lanes_busy_s[at :: len(LANES)]) for at, name in enumerate(LANES)}
        return {
            "compute": max(self.computed_s),
            **lanes,
            "update": self.updating_s,
            "queueing": self.queued_s,
            "disk": self.disk_busy_s,
        }

    def step(self) -> float:
        """Run one optimizer step; return when its last computation ends."""
        forward_s = backward_s = 0.0
        for number in range(self.work.passes):
            began_s = max(self.compute_s)
            chunks_s, here = self._forward(first=number == 0)
            begins_s, loss_s = self._head(chunks_s, here, number)
            self._backward([loss_s] * self.chunks, number)
            forward_s += begins_s - began_s
            backward_s += max(self.compute_s) - loss_s
        self.phases_s = {"forward_phase": forward_s, "backward_phase": backward_s}
        return self._optimizer()

    # -- resources ---------------------------------------------------------------------------------

    def _compute(self, card: int, ready_s: float, seconds: float) -> tuple[float, float]:
        begin_s = max(self.compute_s[card], ready_s)
        self.compute_s[card] = begin_s + seconds
        self.computed_s[card] += seconds
        return begin_s, begin_s + seconds

    def _queue(self, seconds: float) -> float:
        """Let the host's thread queue work; return when it has."""
        self.thread_s += seconds
        self.queued_s += seconds
        return self.thread_s

    def _copy(self, lane: int, card: int, ready_s: float, seconds: float) -> float:
        """Copy after everything queued before; return when the copy ends."""
        at = len(LANES) * card + lane
        end_s = max(self.lanes_s[at], ready_s) + seconds
        self.lanes_s[at] = end_s
        self.lanes_busy_s[at] += seconds
        return end_s

    def _hop(self, source: int, target: int, ready_s: float, size_bytes: int) -> float:
        """Copy a chunk from one card to another; return when it has arrived."""
        if source == target or not size_bytes:
            return ready_s
        rate = self._rates.peer_bytes_per_s(source, target)
        cards = self._rates.cards
        if rate is None:
            self.through_host_bytes += 2 * size_bytes
            down_s = self._copy_beside(1, source, ready_s, size_bytes / cards[source].down_both)
            return self._copy_beside(0, target, down_s, size_bytes / cards[target].up_both)
        if self._rates.is_own_link(source, target):
            free_s = self.links_s.get((source, target), 0.0)
            self.links_s[source, target] = max(free_s, ready_s) + size_bytes / rate
            return self.links_s[source, target]
        down_s = self._copy_beside(1, source, ready_s, size_bytes / rate)
        return max(down_s, self._copy_beside(0, target, ready_s, size_bytes / rate))

    def _copy_beside(self, lane: int, card: int, ready_s: float, seconds: float) -> float:
        """Copy on a second stream, which shares the lane's bandwidth with its queued copies."""
        at = len(LANES) * card + lane
        shared = 2 if ready_s < self.lanes_s[at] else 1
        self.lanes_s[at] = max(self.lanes_s[at], ready_s) + seconds
        self.lanes_busy_s[at] += seconds
        return ready_s + shared * seconds

    def _upload(self, at: int, seconds: float, after_s: float, read_s: float = 0.0) -> float:
        """Upload weights once they are updated, requested, and have a slot; read_s: from disk."""
        if not seconds:
            return after_s
        group = self.groups[at]
        asked_s = max(self.asked_s, after_s)
        if group.streams:
            uses, slots = self.uses[group.card], self.work.slots[group.card]
            ahead = max(1, slots - 1)
            if len(uses) >= ahead:
                asked_s = max(asked_s, uses[-ahead].begin_s)
            if len(uses) >= slots:
                asked_s = max(asked_s, uses[-slots].end_s)
        if not read_s:
            return self._copy(0, group.card, asked_s, seconds)
        self.disk_s = max(self.disk_s, asked_s) + read_s  # blocks cross the bus as they come
        self.disk_busy_s += read_s
        return max(self.disk_s, self._copy(0, group.card, asked_s, seconds))

    # -- passes ------------------------------------------------------------------------------------

    def _flow(  # noqa: C901, PLR0912, PLR0915  # the hot loop, in one piece
        self, chunks_s: list[float], here: int, *, backward: bool, number: int
    ) -> int:
        """Send all chunks, ready at `chunks_s` on card `here`, through the blocks; return the card
        where they end."""
        groups, times, clips = self.groups, self.work.queueing, self.work.clips
        alone, beside = times.forward, times.forward_beside
        if backward:
            alone = times.backward if clips else times.backward_beside
            beside = times.backward_beside
        # of the chunk with the work done once a block, and of others: without AdamW, and with
        once_s = alone.at(1), max(alone.at(1), beside.at(1))
        other_s = alone.slope, max(alone.slope, beside.slope)
        several, hop_bytes = self.work.cards > 1, self.work.hop_bytes
        compute_s, computed_s = self.compute_s, self.computed_s
        where, weights_s = [here] * self.chunks, [0.0] * len(groups)
        uses: dict[int, _Use] = {}
        last = self.chunks - 1
        for at, chunk in self._backward_items if backward else self._forward_items:
            group = groups[at]
            card = group.card
            first, final = chunk == 0, chunk == last
            thread_s = self.thread_s
            if first:
                weights_s[at] = self._weights(at, group, backward, number)
                if not backward and not number and self.updated_s[at] > thread_s:
                    thread_s = self.updated_s[at]  # the thread waits for what it uploads
            if backward and final and not clips:
                thread_s = max(thread_s, self._lent_free(group))
            is_once = final if backward else first
            seconds = (once_s if is_once else other_s)[thread_s < self.adamw_s]
            self.thread_s = thread_s = thread_s + seconds
            self.queued_s += seconds
            ready_s = chunks_s[chunk]
            if several and where[chunk] != card:
                ready_s = self._hop(where[chunk], card, ready_s, hop_bytes[chunk])
                where[chunk] = card
            begin_s = max(compute_s[card], ready_s, thread_s, weights_s[at])
            seconds = (group.backward_s if backward else group.forward_s)[chunk]
            end_s = begin_s + seconds
            if backward and final:  # the sum is rounded into staging at the end of the block
                staged = self.staged_s[card, group.down_s[0]]
                if len(staged) >= group.staging and staged[-group.staging] > end_s:
                    end_s = staged[-group.staging]
            compute_s[card] = chunks_s[chunk] = end_s
            computed_s[card] += seconds
            if group.streams:
                if first:
                    uses[at] = _Use()
                    uses[at].begin_s = begin_s
                    self.uses[card].append(uses[at])
                if final:
                    uses[at].end_s = end_s
            if final:
                if backward:
                    self._download(at, group, end_s, number)
                elif group.down_input_s:
                    self._copy(1, card, end_s, group.down_input_s)
        return where[0]

    def _weights(self, at: int, group: GroupWork, backward: bool, number: int) -> float:
        """Return when a block's weights, and in the backward pass its offloaded inputs, are on the
        card."""
        read_s = group.read_s and self.work.read_s(at, backward=backward, number=number)
        if not backward:
            first = number == 0
            seconds = group.up_forward_s if first or group.streams else 0.0
            return self._upload(at, seconds, self.updated_s[at] if first else 0.0, read_s)
        sums_s = group.up_sums_s[number - 1] if number and group.up_sums_s else 0.0
        is_there = group.streams and self._last_streamed[group.card] == at  # since its forward
        return self._upload(at, sums_s + (0.0 if is_there else group.up_backward_s), 0.0, read_s)

    def _download(self, at: int, group: GroupWork, ready_s: float, number: int) -> None:
        """Download the gradients of a group once its moments are done."""
        seconds = group.down_s[min(number, len(group.down_s) - 1)]
        last = number == self.work.passes - 1
        if last and group.exchange_s:
            ready_s = max(self.exchange_s[group.card], ready_s) + group.exchange_s
            self.exchange_s[group.card] = self.arrived_s[at] = ready_s
        if not seconds:
            return
        if number == 0 and group.moments_s:
            self.thread_s = max(self.thread_s, self.moments_s[at])
            ready_s = max(ready_s, self.moments_s[at])
        self.arrived_s[at] = self._copy(1, group.card, ready_s, seconds)
        self.staged_s[group.card, seconds].append(self.arrived_s[at])
        if last and group.adds_s:
            self.added_s = max(self.added_s, self.arrived_s[at]) + group.adds_s
            self.arrived_s[at] = self.added_s
        if not self.work.clips:
            self._update(at, self.arrived_s[at])
            self.lent_s[group.ring].append(self.updated_s[at])

    def _lent_free(self, group: GroupWork) -> float:
        """Return when the host has a free buffer for the gradients of a step in backward."""
        lent, depth = self.lent_s[group.ring], group.ring[1]
        return lent[-depth] if len(lent) >= depth else 0.0

    def _update(self, at: int, ready_s: float) -> None:
        """Run AdamW of one group, after the groups before it, while its states on disk pass."""
        seconds, states_s = self.groups[at].update_s, self.groups[at].states_s
        begin_s = max(self.adamw_s, ready_s)
        end_s = begin_s + seconds
        if states_s:
            self.disk_s = max(self.disk_s, begin_s) + states_s
            self.disk_busy_s += states_s
            end_s = max(end_s, self.disk_s)
        self.adamw_s = self.updated_s[at] = end_s
        self.updating_s += seconds

    def _forward(self, *, first: bool) -> tuple[list[float], int]:
        """Send all chunks through all blocks; return when each is ready, and on which card."""
        ready_s = 0.0
        if first:
            self.asked_s = self.thread_s
            for at in self.starts:
                seconds = self.groups[at].up_forward_s
                ready_s = max(ready_s, self._upload(at, seconds, self.updated_s[at]))
        chunks_s = [max(ready_s, self.compute_s[EDGES_CARD])] * self.chunks
        here = self._flow(chunks_s, EDGES_CARD, backward=False, number=0 if first else 1)
        self._update_moments()
        return chunks_s, here

    def _head(  # noqa: C901  # one thing after the other
        self, chunks_s: list[float], here: int, number: int
    ) -> tuple[float, float]:
        """Compute the loss and its gradient once all chunks have arrived; return when the first
        card begins and when it has the gradient."""
        work, first = self.work, number == 0
        ready_s = self._queue(work.queueing.outside_s)
        if first:
            for at, seconds in self._head_uploads:
                ready_s = max(ready_s, self._upload(at, seconds, self.updated_s[at]))
        loss_s, begun_s, began_s, ends_s = 0.0, 0.0, 0.0, [0.0]
        sums_up_s = work.head_sums_up_s[number - 1] if number and work.head_sums_up_s else 0.0
        for card, seconds in enumerate(work.head_s):
            if not seconds:
                continue
            share = seconds / sum(work.head_s)
            hops = zip(chunks_s, work.hop_bytes, strict=True)
            there_s = max(self._hop(here, card, at_s, int(share * n)) for at_s, n in hops)
            if card != EDGES_CARD and first:
                copied_s = self._hop(EDGES_CARD, card, ready_s, work.head_copy_bytes)
                there_s = max(there_s, copied_s)
            if work.head_up_s:  # while the card computes, except sums, which it waits for
                copied_s = self._copy(0, card, there_s, work.head_up_s + sums_up_s)
                there_s = max(there_s + sums_up_s, copied_s - seconds)
            begin_s, end_s = self._compute(card, max(ready_s, there_s), seconds)
            begun_s = max(begun_s, begin_s)
            if card == EDGES_CARD:
                began_s = begin_s
            if work.slope_bytes and card != EDGES_CARD:  # chunk by chunk, the last at its end
                size = work.slope_bytes[card]
                last = min(size, sum(work.slope_bytes) // work.head_chunks)
                ends_s.append(self._hop(card, EDGES_CARD, begin_s, size - last))
                ends_s.append(self._hop(card, EDGES_CARD, end_s, last))
            if card != EDGES_CARD:
                self._hop(card, EDGES_CARD, end_s, work.head_sum_bytes)
                back_bytes = int(share * sum(work.hop_bytes))
                end_s = self._hop(card, EDGES_CARD, end_s, back_bytes)
            loss_s = max(loss_s, end_s)
        if work.head_adds_s:  # chunk by chunk, while others are computed
            _, end_s = self._compute(EDGES_CARD, begun_s, work.head_adds_s)
            last_s = work.head_adds_s / work.head_chunks
            loss_s = max(loss_s, end_s, max(ends_s) + last_s)
        return began_s or begun_s, loss_s

    def _backward(self, chunks_s: list[float], number: int) -> None:
        """Send all chunks back through all blocks."""
        for at in self.heads:
            self._download(at, self.groups[at], chunks_s[0], number)
        if self.work.behind_head_s:
            self._compute(EDGES_CARD, chunks_s[0], self.work.behind_head_s)
        here = self._flow(chunks_s, EDGES_CARD, backward=True, number=number)
        hops = zip(chunks_s, self.work.hop_bytes, strict=True)
        back_s = max(self._hop(here, EDGES_CARD, at_s, size) for at_s, size in hops)
        for at in self.starts:
            self._download(at, self.groups[at], back_s, number)

    def _optimizer(self) -> float:
        """End the step: updates on the cards, and AdamW on the host while the next one begins."""
        work = self.work
        self._queue(work.queueing.optimizer_s)
        computed_s = max(*self.compute_s, *self.exchange_s, self.added_s)
        for card, seconds in enumerate(work.device_update_s):
            self._compute(card, computed_s if work.clips else 0.0, seconds)
        if not work.clips:
            return max(self.compute_s)
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
        """Queue the moments left over from the previous step. With several cards this waits until
        the blocks' forward pass is queued, which AdamW would slow down."""
        if self.work.cards > 1:
            self.adamw_s = max(self.adamw_s, self.thread_s)
        for at in self.moments_left:
            self.adamw_s += self.groups[at].moments_s
            self.moments_s[at] = self.adamw_s
        self.moments_left = []
