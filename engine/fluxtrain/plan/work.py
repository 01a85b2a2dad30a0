"""What each group and each card has to do in one step, in seconds. Pure arithmetic.

`step_work` takes each card's seconds from the share of the model that it computes, by the times of
a block that was timed on this machine, or else by the matmul rate and the constants of the class of
machines. `plan/simulation.py` says when all of it happens.

Not counted: what AdamW and copies take from each other of one card's host memory bandwidth. Of a
mixture of experts every expert counts as computing for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from fluxtrain.plan.calibration import Calibration, Line, chunked
from fluxtrain.plan.dealing import EDGES_CARD, Assignment, cards_of_chunks
from fluxtrain.plan.depths import ring_depth, staging_depth
from fluxtrain.plan.facts import FP32_BYTES, GroupFacts, ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    chunked_head,
    kept_count,
    offloading_blocks,
    rows_of_table,
    slot_count,
)
from fluxtrain.plan.group_placement import GroupPlacement, table_of
from fluxtrain.plan.heads import HeadDealing, token_chunks
from fluxtrain.plan.rates import BF16_UPDATE_BYTES, NOTHING, CardsRates, Rates, host_update
from fluxtrain.plan.tables import TableRows

FORWARD_PASSES = 2  # operations a weight and token
BACKWARD_PASSES = 6  # recomputed forward, gradients of inputs and of weights
FROZEN_BACKWARD_PASSES = 4  # no gradients of weights
ADDING = 1 / 3  # of a head's products: the gradient of its weight; the others are of each token
# Copies of blocks in training beside the fastest: the deciles of 492 in recorded steps of one host
# (about the same of others, see docs/traces), in an order in which slow ones stand alone.
UNEVEN = (1.00, 1.51, 1.04, 1.29, 1.01, 1.71, 1.06, 1.38, 1.01, 1.20)
_MEAN = sum(UNEVEN) / len(UNEVEN)  # the rate of the bus is that of all of them


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """The work of one group on its card; a block's seconds are for each chunk of rows."""

    card: int
    kind: Literal["block", "start", "head"]  # start: edges before the blocks; head: behind them
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    up_forward_s: float = 0.0  # its weights, once a pass or (not `streams`) once a step
    up_backward_s: float = 0.0  # its weights and the inputs that waited on the host
    up_sums_s: tuple[float, ...] = ()  # gradients of earlier passes, for each further pass
    up_head_s: float = 0.0  # of a tied embedding that is looked up by rows, for the head
    read_s: float = 0.0  # its weights from disk, each time that they are uploaded
    reads_trained: bool = False  # which are trained there; else frozen
    streams: bool = False  # through slots that the streamed blocks of the card share
    down_input_s: float = 0.0  # inputs that wait on the host
    down_s: tuple[float, ...] = (0.0,)  # gradients, of each pass
    exchange_s: float = 0.0  # adding gradients of other processes, on the cards
    adds_s: float = 0.0  # the same on the host, behind the download
    staging: int = 2  # device buffers that they are downloaded through
    ring: tuple[int, int] = (0, 3)  # their size on the host, and how many buffers of it there are
    states_s: float = 0.0  # its optimizer states from disk and back, with its update
    update_s: float = 0.0  # AdamW on the host; of the weights alone where moments are deferred
    moments_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QueueTimes:
    """Seconds in which the host's one thread queues the work of all cards; a block's are lines
    over its chunks as in `GroupWork`. The thread is slower while AdamW runs on the same cores."""

    forward: Line = NOTHING
    backward: Line = NOTHING
    forward_beside: Line = NOTHING  # while AdamW runs
    backward_beside: Line = NOTHING
    outside_s: float = 0.0  # of a batch: all but the blocks
    optimizer_s: float = 0.0  # of a step


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one optimizer step."""

    groups: tuple[GroupWork, ...]  # in forward order
    slots: tuple[int, ...]  # of each card
    device_update_s: tuple[float, ...]  # of each card
    head_s: tuple[float, ...]  # loss and its gradient, of each card
    head_adds_s: float = 0.0  # for the first card to add up the slopes of all
    head_chunks: int = 1  # of tokens
    head_up_s: float = 0.0  # uploads of a head in vocabulary chunks
    head_sums_up_s: tuple[float, ...] = ()  # of its sums, in each further pass, which it waits for
    head_copy_bytes: int = 0  # of its weight, once a step, to each other card that computes with it
    head_sum_bytes: int = 0  # that each other card adds to the head's gradient
    slope_bytes: tuple[int, ...] = ()  # that each card sends to the first, where that adds up
    behind_head_s: float = 0.0  # gradients of head and embedding on their way to their sums
    hop_bytes: tuple[int, ...] = ()  # that pass between two cards, of each chunk in `GroupWork`
    queueing: QueueTimes = QueueTimes()
    beside_bytes_s: float = 0.0  # without a GPU: groups on the host, beside their bytes
    clips: bool = True  # updates wait for the norm of all gradients
    passes: int = 1  # batches a step
    tokens: int = 0
    host_bytes: float = 0.0  # of several cards: moved in host memory, but for hops

    @property
    def chunks(self) -> int:
        """Return the number of chunks that are simulated separately."""
        return len(self.hop_bytes)

    @property
    def cards(self) -> int:
        """Return the number of cards that compute."""
        return len(self.slots)

    @cached_property
    def _in_slots(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the blocks whose weights are still in slots where a forward pass begins, and where
        a backward pass does: the last ones of the pass before."""
        first, last = list[int](), list[int]()
        for card, slots in enumerate(self.slots):
            streamed = [at for at, g in enumerate(self.groups) if g.streams and g.card == card]
            first += streamed[:slots]
            last += streamed[-slots:]
        return frozenset(first), frozenset(last)

    def read_s(self, at: int, *, backward: bool, number: int) -> float:
        """Return the seconds in which a block's weights on disk are read for a pass. The step has
        changed trained ones before its pass 0."""
        group, is_step = self.groups[at], not (backward or number)
        if not group.streams:
            return group.read_s * is_step
        is_there = at in self._in_slots[backward] and not (is_step and group.reads_trained)
        return group.read_s * (not is_there)

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of a step by kind of work, overlapping or not."""
        blocks = [group for group in self.groups if group.kind == "block"]
        passes = self.passes
        return {
            "forward": passes * sum(sum(group.forward_s) for group in blocks),
            "head": passes * (sum(self.head_s) + self.head_adds_s),
            "backward": passes
            * (sum(sum(group.backward_s) for group in blocks) + self.behind_head_s),
            "upload_forward": passes * self.head_up_s
            + sum(
                group.up_head_s + group.up_forward_s * (passes if group.streams else 1)
                for group in self.groups
            ),
            "upload_backward": sum(self.head_sums_up_s)
            + sum(passes * group.up_backward_s + sum(group.up_sums_s) for group in self.groups),
            "disk_read": sum(
                self.read_s(at, backward=backward, number=number)
                for at in range(len(self.groups))
                for number in range(passes)
                for backward in (False, True)
            ),
            "disk_states": sum(group.states_s for group in self.groups),
            "download": sum(passes * g.down_input_s + sum(g.down_s) for g in self.groups),
            "host_update": sum(group.update_s for group in self.groups),
            "deferred_moments": sum(group.moments_s for group in self.groups),
            "device_update": sum(self.device_update_s),
            "beside_bytes": self.beside_bytes_s,
            "queueing": passes
            * (
                len(blocks)
                * (self.queueing.forward.at(self.chunks) + self.queueing.backward.at(self.chunks))
                + self.queueing.outside_s
            )
            + self.queueing.optimizer_s,
        }


def step_work(
    dealt: Assignment,
    layouts: Sequence[Layout],  # of each card
    rates: CardsRates,  # of the cards that compute
    *,
    clips: bool = True,
    passes: int = 1,
    head_dealing: HeadDealing = "one_card",
) -> StepWork:
    """Return the work of one step, where each card has placed its share by its layout."""
    shares = [_Share(dealt, card, layouts[card], rates, clips) for card in range(dealt.number)]
    found = [share.groups(passes) for share in shares]
    works = [iter(groups) for groups in found]
    groups = tuple(next(works[card]) for card in dealt.of_groups())
    row, first = dealt.facts.row, shares[EDGES_CARD]
    assert row is not None, "time needs to know the rows"
    layout = layouts[EDGES_CARD]
    times = _queueing(shares, clips)
    head = _HeadWork(dealt, first.head_s, rates, head_dealing, layout.batch_rows)
    return StepWork(
        groups=groups,
        slots=tuple(max(1, slot_count(share.facts, share.layout)) for share in shares),
        device_update_s=tuple(share.device_update_s for share in shares),
        head_s=head.seconds,
        head_adds_s=head.adds_s,
        head_up_s=first.head_up_s,
        head_sums_up_s=first.head_sums_up_s(passes),
        head_chunks=head.chunks,
        head_copy_bytes=head.copy_bytes,
        head_sum_bytes=head.sum_bytes,
        slope_bytes=head.slope_bytes,
        behind_head_s=first.behind_head_s,
        hop_bytes=tuple(sum(rows) * row.block_input_bytes for rows in first.chunks),
        queueing=times if dealt.number > 1 else _at_once(times, len(_chunks(layout))),
        beside_bytes_s=first.beside_bytes_s,
        clips=clips,
        passes=passes,
        tokens=passes * layout.batch_rows * row.sequence_length,
        host_bytes=sum(
            share.host_bytes(groups, passes) for share, groups in zip(shares, found, strict=True)
        )
        if dealt.number > 1
        else 0.0,
    )


def computing_s(facts: ModelFacts, layout: Layout, rates: Rates) -> tuple[float, float, float]:
    """Return the seconds of the blocks' forward, of the modules outside them, and of backward."""
    row = facts.row
    assert row is not None, "time needs to know the rows"
    tried, batch, chunk = rates.calibration, layout.batch_rows, layout.chunk_rows
    if tried is not None:
        again_s = kept_s = chunked(tried.backward, batch, chunk)
        if tried.kept_backward is not None:
            kept_s = min(again_s, chunked(tried.kept_backward, batch, chunk))
        kept = kept_count(facts, layout)
        return (
            facts.layers * chunked(tried.forward, batch, chunk),
            tried.outside_forward.at(batch),
            (facts.layers - kept) * again_s + kept * kept_s + tried.outside_backward.at(batch),
        )
    tokens = layout.batch_rows * row.sequence_length
    blocks = facts.blocks
    trained = blocks.trained
    frozen = sum(count * group.frozen for group, count in blocks.alike)
    # scores and their product with the values, of the causal half
    attention = 2 * row.sequence_length * row.hidden * len(blocks)
    forward = FORWARD_PASSES * (trained + frozen) + attention
    backward = BACKWARD_PASSES * trained + FROZEN_BACKWARD_PASSES * frozen + 3 * attention
    head = row.hidden * row.vocabulary
    head_passes = BACKWARD_PASSES if facts.head_parameters else FROZEN_BACKWARD_PASSES
    reached = rates.matmul_per_s * rates.efficiency.matmul_fraction
    chunks = -(-layout.batch_rows // max(1, layout.chunk_rows))
    beside_s = rates.efficiency.block_chunk_s * len(blocks) * chunks
    return (
        forward * tokens / reached + beside_s / 4,
        head_passes * head * tokens / reached,
        backward * tokens / reached + beside_s * 3 / 4,
    )


def _chunks(layout: Layout) -> list[int]:
    """Return the rows of each chunk of a batch; the last may have fewer."""
    chunk = max(1, min(layout.chunk_rows, layout.batch_rows))
    whole, left = divmod(layout.batch_rows, chunk)
    return [chunk] * whole + ([left] if left else [])


class _HeadWork:
    """The work of the head's loss on each card."""

    def __init__(
        self,
        dealt: Assignment,
        head_s: float,
        rates: CardsRates,
        dealing: HeadDealing,
        batch_rows: int,
    ) -> None:
        """Deal the head's work; `head_s` are the seconds of the first card where it does all."""
        facts, number, row = dealt.facts, dealt.number, dealt.facts.row
        assert row is not None, "time needs to know the rows"
        self.chunks = token_chunks(row, batch_rows)
        if number == 1 or (dealing == "in_order" and self.chunks < 2):
            dealing = "one_card"
        speeds = [_speed(card) for card in rates.cards[:number]]
        adds = facts.head_parameters > 0 and dealing == "in_order"
        turn = cards_of_chunks(self.chunks, number, adds=adds)
        shares = [turn.count(card) / self.chunks for card in range(number)]
        self.adds_s = head_s * ADDING * adds
        if dealing == "one_card":
            self.seconds: tuple[float, ...] = (head_s, *[0.0] * (number - 1))
        elif dealing == "summed":
            self.seconds = (head_s * speeds[0] / sum(speeds),) * number
        else:
            slopes_s = head_s - self.adds_s
            self.seconds = tuple(
                share * slopes_s * speeds[0] / speed
                for share, speed in zip(shares, speeds, strict=True)
            )
        is_dealt = dealing != "one_card"
        self.copy_bytes = facts.head_dtype_bytes * facts.head_parameters * is_dealt
        self.sum_bytes = FP32_BYTES * facts.head_parameters * (dealing == "summed")
        slopes = batch_rows * row.sequence_length * row.vocabulary * row.dtype_bytes
        self.slope_bytes = tuple(int(share * slopes) for share in shares) if adds else ()


def _speed(rates: Rates) -> float:
    tried = rates.calibration
    if tried is None:
        return rates.matmul_per_s
    return 1 / max(1e-12, tried.forward.slope + tried.backward.slope)


class _Share:
    """One card's work in a step."""

    def __init__(
        self, dealt: Assignment, card: int, layout: Layout, rates: CardsRates, clips: bool
    ) -> None:
        self.card, self.layout, self.whole = card, layout, dealt.facts
        self.facts: ModelFacts = dealt.share(card)
        self.rates: Rates = rates.cards[card]
        host = rates.cards[0]  # the same host updates the groups of all cards
        self.host_rates = host.beside_backward() if host.has_gpu and not clips else host
        tiers = by_tier(self.facts, layout)
        self.on_device, self.on_host = tiers["device"], tiers["host"]
        self.by_rows = rows_of_table(self.facts, layout, self.on_host)
        self.chunked = chunked_head(self.facts, layout, self.on_host)
        forward_s, self.head_s, backward_s = computing_s(self.facts, layout, self.rates)
        if self.chunked is not None:
            self.head_s *= self.chunked.compute_share
        tried = self.rates.calibration
        outside_s = 0.0 if tried is None else tried.outside_backward.at(layout.batch_rows)
        self.behind_head_s = outside_s if card == EDGES_CARD else 0.0
        self.block_s = (
            forward_s / max(1, self.facts.layers),
            (backward_s - outside_s) / max(1, self.facts.layers),
        )
        row = self.facts.row
        assert row is not None, "time needs to know the rows"
        self._input_bytes = layout.batch_rows * row.block_input_bytes
        # on one card nothing comes between the chunks of a block
        rows = _chunks(layout)
        self.chunks = [[count] for count in rows] if dealt.number > 1 else [rows]
        self._alike: dict[tuple[object, ...], GroupWork] = {}

    @property
    def head_up_s(self) -> float:
        """Return the seconds of uploads of a head in vocabulary chunks."""
        return 0.0 if self.chunked is None else self.chunked.copied_bytes / self.rates.up

    def head_sums_up_s(self, passes: int) -> tuple[float, ...]:
        """Return the seconds of uploads of the sums of a head in vocabulary chunks, for each pass
        after the first."""
        if self.chunked is None:
            return ()
        group = self.chunked.group
        ups = [group.rounded_bytes, *[FP32_BYTES * group.trained] * (passes - 2)][: passes - 1]
        return tuple(size / self.rates.up for size in ups)

    @property
    def device_update_s(self) -> float:
        """Return the seconds of AdamW for the groups that live on the card."""
        tried = self.rates.calibration
        return 0.0 if tried is None else self.on_device.trained * tried.device_update_s

    @property
    def beside_bytes_s(self) -> float:
        """Return the seconds that groups on the host take besides their updated and copied bytes,
        without a GPU."""
        tried = self.rates.calibration
        if self.rates.has_gpu or tried is None or tried.streamed is None:
            return 0.0
        update_bytes_per_s = BF16_UPDATE_BYTES * self.rates.adamw_per_s
        one_s = tried.streamed.beside_bytes_s(update_bytes_per_s, self.rates.copy_bytes_per_s)
        return len(self.on_host) * one_s

    def groups(self, passes: int) -> list[GroupWork]:
        """Return the work of each group of the card, in forward order."""
        blocks = self.facts.layers
        found, block = [], 0
        rows = table_of(self.facts, self.layout)
        for group, row in zip(self.facts.groups, rows, strict=True):
            if group.kind == "block":
                found.append(self._block(group, row, block, passes))
                block += 1
            else:
                behind = bool(blocks and block == blocks)
                found.append(self._edge(group, row, passes, behind=behind))
        return found

    def _block(self, group: GroupFacts, row: GroupPlacement, at: int, passes: int) -> GroupWork:
        """Return a block's work; blocks with equal work share one object."""
        uneven = at % len(UNEVEN)
        tiers = row.weights, row.state, row.gradients
        alike = (id(group.unnamed), tiers, row.resident, row.activations, uneven)
        found = self._alike.get(alike)
        if found is None:
            found = self._alike[alike] = self._block_anew(group, row, UNEVEN[uneven], passes)
        return found

    def _block_anew(
        self, group: GroupFacts, row: GroupPlacement, uneven: float, passes: int
    ) -> GroupWork:
        on_host = row.weights != "device"
        streams = on_host and not row.resident
        uneven /= _MEAN
        input_bytes = self._input_bytes * (row.activations == "inputs_on_host")
        up_bytes = group.weight_bytes if streams else group.rounded_bytes * on_host
        forward_s, backward_s = self._chunk_s(row)
        gradients: dict[str, Any] = {"exchange_s": self._exchange_s(group)}
        if on_host:
            gradients = self._gradients(group, row, passes)
        return GroupWork(
            card=self.card,
            kind="block",
            forward_s=forward_s,
            backward_s=backward_s,
            up_forward_s=uneven * up_bytes / self.rates.up,
            up_backward_s=(uneven * group.weight_bytes * streams + input_bytes)
            / self.rates.up_both,
            read_s=self._read_s(group, row) * (streams or not group.file_bytes),
            reads_trained=not group.file_bytes,
            streams=streams,
            down_input_s=input_bytes / self.rates.down,
            **gradients,
        )

    def _read_s(self, group: GroupFacts, row: GroupPlacement) -> float:
        """Return the seconds in which weights on disk are read for one upload."""
        size = (group.file_bytes or group.weight_bytes) * (row.weights == "disk")
        return size / (self.host_rates.disk_bytes_per_s or float("inf"))

    def _chunk_s(self, row: GroupPlacement) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the seconds of each chunk forward and backward."""
        tried = self.rates.calibration
        if tried is None:
            shares = [sum(rows) / self.layout.batch_rows for rows in self.chunks]
            forward_s, backward_s = self.block_s
            return tuple(forward_s * s for s in shares), tuple(backward_s * s for s in shares)
        batch, chunk = self.layout.batch_rows, self.layout.chunk_rows
        line, kept = tried.backward, tried.kept_backward
        if row.activations == "kept" and kept is not None:
            line = min(line, kept, key=lambda one: chunked(one, batch, chunk))
        return tuple(
            tuple(sum(map(one.at, rows)) for rows in self.chunks) for one in (tried.forward, line)
        )  # type: ignore[return-value]  # both of them

    def _edge(
        self, group: GroupFacts, row: GroupPlacement, passes: int, *, behind: bool
    ) -> GroupWork:
        kind: Literal["start", "head"] = "head" if behind else "start"
        if group not in self.on_host:
            return GroupWork(card=self.card, kind=kind, exchange_s=self._exchange_s(group))
        by_rows = self.by_rows if self.by_rows and self.by_rows.table is group else None
        in_chunks = self.chunked is not None and self.chunked.group is group
        up_bytes = group.rounded_bytes
        if by_rows is not None:
            up_bytes = by_rows.weight_bytes
        elif behind and in_chunks:
            up_bytes = 0
        head_bytes = group.rounded_bytes * (by_rows is not None and by_rows.tied and not in_chunks)
        gradients = self._gradients(group, row, passes)
        if gradients and in_chunks:  # its sums are uploaded while the head waits for them
            gradients["up_sums_s"] = ()
        if gradients and by_rows is not None:
            gradients |= self._gradients_by_rows(by_rows, gradients, passes)
        return GroupWork(
            card=self.card,
            kind=kind,
            up_forward_s=up_bytes / self.rates.up,
            up_head_s=head_bytes / self.rates.up,
            **gradients,
        )

    def _gradients_by_rows(
        self, by_rows: TableRows, whole: dict[str, Any], passes: int
    ) -> dict[str, Any]:
        """Return the copies of an embedding's gradients by rows. Sums of several passes stay on
        the device and are downloaded with each pass; a tied embedding adds the head's."""
        if by_rows.tied and not by_rows.in_vocab_chunks:
            return {}
        each = [by_rows.gradient_bytes]
        for number in range(2, passes + 1):
            in_chunks = by_rows.in_vocab_chunks
            each.append(by_rows.kept_bytes if in_chunks else by_rows.sum_bytes(number))
        downs = [size / self.rates.down_both for size in each]
        if by_rows.tied:
            downs = [one + other for one, other in zip(downs, whole["down_s"], strict=True)]
        return {"down_s": tuple(downs), "up_sums_s": (), "exchange_s": 0.0, "adds_s": 0.0}

    def _gradients(self, group: GroupFacts, row: GroupPlacement, passes: int) -> dict[str, Any]:
        """Return the copies and updates of the gradients of a group on the host. The first pass
        downloads them rounded; each further one uploads the sum, adds to it, and downloads it in
        fp32."""
        if not group.trained:
            return {}
        wide = FP32_BYTES * group.trained if passes > 1 else 0
        down_bytes, rates, spills = group.rounded_bytes, self.host_rates, row.state == "disk"
        deferred = self.layout.deferred_moments and not spills  # it would read them twice
        update_s, moments_s = host_update(group, rates, deferred=deferred)
        there = group.state_bytes + group.rounded_bytes * (row.gradients == "disk")
        there += group.weight_bytes * (row.weights == "disk" and not group.file_bytes)
        read_s = there / (rates.disk_bytes_per_s or float("inf"))
        write_s = there / (rates.disk_write_bytes_per_s or float("inf"))
        ups = [down_bytes, *[wide] * (passes - 2)][: passes - 1]
        downs: list[float] = [down_bytes, *[wide] * (passes - 1)]
        facts = self.whole
        parts = 1 if "disk" in (row.weights, row.state, row.gradients) else facts.parts
        adds_s, on_host = 0.0, facts.adds_on_host and parts > 1 and group.kind == "block"
        if on_host:
            downs[-1] = FP32_BYTES * group.trained
            moved = FP32_BYTES * facts.processes * group.trained + group.rounded_bytes
            adds_s = moved / parts / (BF16_UPDATE_BYTES * rates.adamw_per_s)
        else:
            downs[-1] /= parts
        return {
            "exchange_s": 0.0 if on_host else self._exchange_s(group),
            "adds_s": adds_s,
            "down_s": tuple(size / self.rates.down_both for size in downs),
            "up_sums_s": tuple(size / self.rates.up_both for size in ups),
            "staging": staging_depth(group.rounded_bytes),
            "ring": (group.rounded_bytes, ring_depth(group.rounded_bytes)),
            "states_s": (read_s + write_s) * spills,
            "update_s": update_s / parts,
            "moments_s": moments_s / parts,
        }

    def _exchange_s(self, group: GroupFacts) -> float:
        """Return the seconds in which the cards of all processes add up a group's gradients: each
        sends and gets all but its own part twice; 0 where no rate is known."""
        sent = 2 * (1 - 1 / self.whole.processes) * FP32_BYTES * group.trained
        return sent / (self.rates.peer_bytes_per_s or float("inf"))

    def host_bytes(self, groups: Sequence[GroupWork], passes: int) -> float:
        """Return the bytes that a step moves in host memory: updates, and copies up and down."""
        deferred = self.layout.deferred_moments
        updates = sum(
            count * (2 * group.pass_bytes if deferred and group.pass_bytes else group.update_bytes)
            for group, count in self.on_host.alike
        )
        rates, copies = self.rates, 0.0
        for work in groups:
            copies += rates.up * work.up_forward_s * (passes if work.streams else 1)
            copies += rates.up * work.up_head_s
            copies += rates.up_both * (passes * work.up_backward_s + sum(work.up_sums_s))
            copies += rates.down * passes * work.down_input_s
            copies += rates.down_both * sum(work.down_s)
        return updates + copies + passes * self.head_up_s * rates.up


def _queueing(shares: Sequence[_Share], clips: bool) -> QueueTimes:
    """Return the times of the thread that queues, by the card whose blocks were timed."""
    tried = shares[EDGES_CARD].rates.calibration
    if tried is None:
        return QueueTimes()
    if tried.host is None:
        backward_s = max(0.0, tried.host_block_s - tried.host_forward_s)
        return QueueTimes(
            forward=Line(base=0.0, slope=tried.host_forward_s),
            backward=Line(base=0.0, slope=backward_s),
        )
    return _timed_queueing(tried, shares, clips)


def _timed_queueing(tried: Calibration, shares: Sequence[_Share], clips: bool) -> QueueTimes:
    host = tried.host
    assert host is not None
    here = sum(count for share in shares for g, count in share.on_device.alike if g.trained)
    there = sum(count for share in shares for g, count in share.on_host.alike if g.trained)
    layers = max(1, shares[0].whole.layers)
    waiting = sum(offloading_blocks(share.facts, share.layout) for share in shares) / layers
    forward_s = waiting * host.offload_forward_s
    backward_s = waiting * host.offload_backward_s
    # each group is stepped in the backward pass where no norm is waited for
    stepped_s = 0.0 if clips else here * host.device_update_s / layers
    optimizer_s = here * host.device_update_s + there * host.host_group_update_s
    return QueueTimes(
        forward=host.forward.plus(forward_s),
        backward=host.backward.plus(backward_s),
        forward_beside=host.forward_beside.plus(forward_s),
        backward_beside=host.backward_beside.plus(backward_s + stepped_s),
        outside_s=host.outside_s,
        optimizer_s=optimizer_s if clips else 0.0,
    )


def _at_once(times: QueueTimes, chunks: int) -> QueueTimes:
    """Return the times of a thread that queues so many chunks at once."""
    names = ("forward", "backward", "forward_beside", "backward_beside")
    whole: dict[str, Any] = {
        name: Line(base=getattr(times, name).at(chunks), slope=0.0) for name in names
    }
    return replace(times, **whole)
