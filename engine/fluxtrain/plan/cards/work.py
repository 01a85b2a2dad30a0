"""What each group and each card has to do in one step, in seconds. Pure arithmetic.

`step_work` takes them from the same functions as the prediction for one card (`plan/cost`), each
card's from the share of the model that it computes. `plan/cards/pipeline.py` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fluxtrain.plan.cards.rates import CardsRates
from fluxtrain.plan.cards.shares import EDGES_CARD, Dealt, cards_of_chunks
from fluxtrain.plan.cost.calibration import Calibration, Line, chunked
from fluxtrain.plan.cost.prefetch import UNEVEN
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import passes_s
from fluxtrain.plan.cost.updates import host_update
from fluxtrain.plan.depths import ring_depth, staging_depth
from fluxtrain.plan.facts import FP32_BYTES, GroupFacts, ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    chunked_head,
    offloading_blocks,
    rows_of_table,
    slot_count,
)
from fluxtrain.plan.group_placement import GroupPlacement, table_of
from fluxtrain.plan.heads import HeadDealing, token_chunks

_MEAN = sum(UNEVEN) / len(UNEVEN)
_NOTHING = Line(base=0.0, slope=0.0)
ADDING = 1 / 3  # of a head's products: the gradient of its weight; the others are of each token


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """One group; seconds of a block are of each chunk."""

    card: int
    kind: Literal["block", "start", "head"]  # start: edges before the blocks; head: behind them
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    up_forward_s: float = 0.0  # its weights, once a pass or (not `streams`) once a step
    up_backward_s: float = 0.0  # its weights and the inputs that waited on the host
    up_sums_s: tuple[float, ...] = ()  # gradients of earlier passes, for each further pass
    streams: bool = False  # through slots that the streamed blocks of the card share
    down_input_s: float = 0.0  # inputs that wait on the host
    down_s: tuple[float, ...] = (0.0,)  # gradients, of each pass
    staging: int = 2  # buffers that they leave through
    ring: tuple[int, int] = (0, 3)  # their size on the host, and how many buffers of it there are
    update_s: float = 0.0  # AdamW on the host; of the weights alone where moments are deferred
    moments_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QueueTimes:
    """Seconds in which the host's one thread queues the work of all cards; a block's are lines over
    its chunks."""

    forward: Line = _NOTHING
    backward: Line = _NOTHING
    forward_beside: Line = _NOTHING  # while AdamW runs
    backward_beside: Line = _NOTHING
    outside_s: float = 0.0  # of a batch
    optimizer_s: float = 0.0  # of a step


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step."""

    groups: tuple[GroupWork, ...]  # in forward order
    slots: tuple[int, ...]  # of each card
    device_update_s: tuple[float, ...]  # of each card
    head_s: tuple[float, ...]  # loss and its gradient, of each card
    head_adds_s: float = 0.0  # for the first card to add up the slopes of all
    head_chunks: int = 1  # of tokens
    head_up_s: float = 0.0  # a head in vocabulary chunks on its way up
    head_copy_bytes: int = 0  # of its weight, once a step, to each other card that computes with it
    head_sum_bytes: int = 0  # that each other card adds to the head's gradient
    slope_bytes: tuple[int, ...] = ()  # that each card sends to the first, where that adds up
    behind_head_s: float = 0.0  # gradients of head and embedding on their way to their sums
    hop_bytes: tuple[int, ...] = ()  # what passes between two cards, of each chunk
    queueing: QueueTimes = QueueTimes()
    clips: bool = True
    passes: int = 1
    tokens: int = 0
    host_bytes: float = 0.0  # that a step moves in host memory, but for what passes between cards

    @property
    def chunks(self) -> int:
        """Chunks of a batch."""
        return len(self.hop_bytes)

    @property
    def cards(self) -> int:
        """How many cards compute."""
        return len(self.slots)


def step_work(
    dealt: Dealt,
    layouts: Sequence[Layout],  # of each card
    rates: CardsRates,  # of the cards that compute
    *,
    clips: bool = True,
    passes: int = 1,
    head_dealing: HeadDealing = "one_card",
) -> StepWork:
    """Say what a step has to do where each card has placed its share as its layout says."""
    shares = [_Share(dealt, card, layouts[card], rates, clips) for card in range(dealt.number)]
    works = [iter(share.groups(passes)) for share in shares]
    groups = tuple(next(works[card]) for card in dealt.of_groups())
    row, first = dealt.facts.row, shares[EDGES_CARD]
    assert row is not None, "time needs to know the rows"
    layout = layouts[EDGES_CARD]
    chunk_rows = _chunks(layout)
    head = _HeadWork(dealt, first.head_s, rates, head_dealing, layout.batch_rows)
    return StepWork(
        groups=groups,
        slots=tuple(max(1, slot_count(share.facts, share.layout)) for share in shares),
        device_update_s=tuple(share.device_update_s for share in shares),
        head_s=head.seconds,
        head_adds_s=head.adds_s,
        head_up_s=first.head_up_s,
        head_chunks=head.chunks,
        head_copy_bytes=head.copy_bytes,
        head_sum_bytes=head.sum_bytes,
        slope_bytes=head.slope_bytes,
        behind_head_s=first.behind_head_s,
        hop_bytes=tuple(rows * row.block_input_bytes for rows in chunk_rows),
        queueing=_queueing(shares, clips),
        clips=clips,
        passes=passes,
        tokens=passes * layout.batch_rows * row.sequence_length,
        host_bytes=sum(share.host_bytes(passes) for share in shares),
    )


def _chunks(layout: Layout) -> list[int]:
    """Rows of each chunk of a batch; the last may have fewer."""
    chunk = max(1, min(layout.chunk_rows, layout.batch_rows))
    whole, left = divmod(layout.batch_rows, chunk)
    return [chunk] * whole + ([left] if left else [])


class _HeadWork:
    """What the head's loss takes of each card."""

    def __init__(
        self, dealt: Dealt, head_s: float, rates: CardsRates, dealing: HeadDealing, batch_rows: int
    ) -> None:
        """`head_s`: of the first card, where it does all."""
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
    """One card's part of a step."""

    def __init__(
        self, dealt: Dealt, card: int, layout: Layout, rates: CardsRates, clips: bool
    ) -> None:
        self.card, self.layout, self.whole = card, layout, dealt.facts
        self.facts: ModelFacts = dealt.share(card)
        self.rates: Rates = rates.cards[card]
        host = rates.cards[0] if clips else rates.cards[0].beside_backward()
        self.host_rates = host  # the same host updates the groups of all cards
        self.on_device, self.on_host = by_tier(self.facts, layout)
        self.by_rows = rows_of_table(self.facts, layout, self.on_host)
        self.chunked = chunked_head(self.facts, layout, self.on_host)
        forward_s, self.head_s, backward_s = passes_s(self.facts, layout, self.rates)
        if self.chunked is not None:
            self.head_s *= self.chunked.compute_share
        tried = self.rates.calibration
        outside_s = 0.0 if tried is None else tried.outside_backward.at(layout.batch_rows)
        self.behind_head_s = outside_s if card == EDGES_CARD else 0.0
        self.block_s = (
            forward_s / max(1, self.facts.layers),
            (backward_s - outside_s) / max(1, self.facts.layers),
        )

    @property
    def head_up_s(self) -> float:
        """Uploads of a head in vocabulary chunks."""
        return 0.0 if self.chunked is None else self.chunked.copied_bytes / self.rates.up

    @property
    def device_update_s(self) -> float:
        """AdamW of the groups that live on the card."""
        tried = self.rates.calibration
        return 0.0 if tried is None else self.on_device.trained * tried.device_update_s

    def groups(self, passes: int) -> list[GroupWork]:
        """Each group of the card, in forward order."""
        blocks = sum(group.kind == "block" for group in self.facts.groups)
        rows = table_of(self.facts, self.layout)
        found, block = [], 0
        for group, row in zip(self.facts.groups, rows, strict=True):
            if group.kind == "block":
                found.append(self._block(group, row, block, passes))
                block += 1
            else:
                found.append(self._edge(group, passes, behind=bool(blocks and block == blocks)))
        return found

    def _block(self, group: GroupFacts, row: GroupPlacement, at: int, passes: int) -> GroupWork:
        on_host = row.weights != "device"
        streams = on_host and not row.resident
        uneven = UNEVEN[at % len(UNEVEN)] / _MEAN
        waits = row.activations == "inputs_on_host"
        assert self.facts.row is not None
        input_bytes = self.layout.batch_rows * self.facts.row.block_input_bytes * waits
        up_bytes = group.weight_bytes if streams else group.rounded_bytes * on_host
        forward_s, backward_s = self._chunk_s(row)
        common = self._gradients(group, group.rounded_bytes, passes) if on_host else {}
        return GroupWork(
            card=self.card,
            kind="block",
            forward_s=forward_s,
            backward_s=backward_s,
            up_forward_s=uneven * up_bytes / self.rates.up,
            up_backward_s=(uneven * group.weight_bytes * streams + input_bytes)
            / self.rates.up_both,
            streams=streams,
            down_input_s=input_bytes / self.rates.down,
            **common,
        )

    def _chunk_s(self, row: GroupPlacement) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each chunk forward and backward."""
        tried, rows = self.rates.calibration, _chunks(self.layout)
        if tried is None:
            shares = [count / sum(rows) for count in rows]
            forward_s, backward_s = self.block_s
            return tuple(forward_s * s for s in shares), tuple(backward_s * s for s in shares)
        again = tried.backward
        kept = tried.kept_backward if row.activations == "kept" else None
        lines = again if kept is None or _is_longer(kept, again, self.layout) else kept
        return tuple(tried.forward.at(n) for n in rows), tuple(lines.at(n) for n in rows)

    def _edge(self, group: GroupFacts, passes: int, *, behind: bool) -> GroupWork:
        kind: Literal["start", "head"] = "head" if behind else "start"
        if group not in self.on_host:
            return GroupWork(card=self.card, kind=kind)
        by_rows = self.by_rows if self.by_rows and self.by_rows.table is group else None
        chunked = self.chunked is not None and self.chunked.group is group
        down_bytes = group.rounded_bytes
        if behind:
            up_bytes = 0 if chunked else group.rounded_bytes
        elif by_rows is None:
            up_bytes = group.weight_bytes
        else:
            up_bytes = by_rows.weight_bytes
            down_bytes = by_rows.gradient_bytes + (group.rounded_bytes if by_rows.tied else 0)
        return GroupWork(
            card=self.card,
            kind=kind,
            up_forward_s=up_bytes / self.rates.up,
            **self._gradients(group, down_bytes, passes),
        )

    def _gradients(self, group: GroupFacts, down_bytes: int, passes: int) -> dict[str, Any]:
        """What becomes of the gradients of a group on the host."""
        if not group.trained:
            return {}
        wide = FP32_BYTES * group.trained if passes > 1 else 0
        update_s, moments_s = host_update(group, self.layout, self.host_rates)
        ups = [down_bytes, *[wide] * (passes - 2)][: passes - 1]
        return {
            "down_s": tuple(
                size / self.rates.down_both for size in [down_bytes, *[wide] * (passes - 1)]
            ),
            "up_sums_s": tuple(size / self.rates.up_both for size in ups),
            "staging": staging_depth(group.rounded_bytes),
            "ring": (group.rounded_bytes, ring_depth(group.rounded_bytes)),
            "update_s": update_s,
            "moments_s": moments_s,
        }

    def host_bytes(self, passes: int) -> float:
        """Bytes of a step in host memory: updates, and copies up and down."""
        deferred = self.layout.deferred_moments
        updates = sum(
            count * (2 * group.pass_bytes if deferred and group.pass_bytes else group.update_bytes)
            for group, count in self.on_host.alike
        )
        copies = 0.0
        for work in self.groups(passes):
            copies += self.rates.up * work.up_forward_s * (passes if work.streams else 1)
            copies += self.rates.up_both * (passes * work.up_backward_s + sum(work.up_sums_s))
            copies += self.rates.down * passes * work.down_input_s
            copies += self.rates.down_both * sum(work.down_s)
        return updates + copies + passes * self.head_up_s * self.rates.up


def _is_longer(one: Line, than: Line, layout: Layout) -> bool:
    batch, chunk = layout.batch_rows, layout.chunk_rows
    return chunked(one, batch, chunk) > chunked(than, batch, chunk)


def _queueing(shares: Sequence[_Share], clips: bool) -> QueueTimes:
    """What the thread that queues needs, by the card whose blocks were timed."""
    tried = shares[0].rates.calibration
    if tried is None:
        return QueueTimes()
    if tried.host is None:
        return QueueTimes(
            forward=Line(base=0.0, slope=tried.host_forward_s),
            backward=Line(base=0.0, slope=max(0.0, tried.host_block_s - tried.host_forward_s)),
        )
    return _timed_queueing(tried, shares, clips)


def _timed_queueing(tried: Calibration, shares: Sequence[_Share], clips: bool) -> QueueTimes:
    host = tried.host
    assert host is not None
    here = sum(g.trained > 0 for share in shares for g in share.on_device)
    there = sum(g.trained > 0 for share in shares for g in share.on_host)
    layers = max(1, shares[0].whole.layers)
    each_update_s = here * host.device_update_s / layers
    waiting = sum(offloading_blocks(share.facts, share.layout) for share in shares) / layers
    forward_s = waiting * host.offload_forward_s
    backward_s = waiting * host.offload_backward_s
    beside_s = backward_s if clips else backward_s + each_update_s
    return QueueTimes(
        forward=host.forward.plus(forward_s),
        backward=host.backward.plus(backward_s),
        forward_beside=host.forward_beside.plus(forward_s),
        backward_beside=host.backward_beside.plus(beside_s),
        outside_s=host.outside_s,
        optimizer_s=here * host.device_update_s + there * host.host_group_update_s
        if clips
        else 0.0,
    )
