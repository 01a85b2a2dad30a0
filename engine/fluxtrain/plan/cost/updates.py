"""Seconds of AdamW on the host, and what the next forward pass waits for of it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.depths import ring_depth
from fluxtrain.plan.facts import GroupFacts, ModelFacts
from fluxtrain.plan.footprint import Layout, by_tier, chunked_head, rows_of_table

FP16_CONVERSION = 0.5  # of an update's time, once more, goes into widening and rounding of fp16
BF16_UPDATE_BYTES = 26  # for each parameter with fp32 moments: what the measured rate counts
BF16_PASS_BYTES = 18  # the same of its weights' pass, and of its moments' pass


def host_updates(facts: ModelFacts, layout: Layout, rates: Rates) -> tuple[float, float]:
    """Count the seconds of AdamW on the host, and of moments that are updated later.

    By the bytes that it moves (26 a parameter, 18 in one of two passes), but no faster than 8-bit
    states were measured, whose codes cost arithmetic.
    """
    update_s = moments_s = 0.0
    for group, count in by_tier(facts, layout)[1].alike:
        one_s, later_s = host_update(group, layout, rates)
        update_s, moments_s = update_s + count * one_s, moments_s + count * later_s
    return update_s, moments_s


def host_update(group: GroupFacts, layout: Layout, rates: Rates) -> tuple[float, float]:
    """The same of one group."""
    bytes_per_s = BF16_UPDATE_BYTES * rates.adamw_per_s
    if layout.deferred_moments and group.pass_bytes:
        weights_bytes_per_s = BF16_PASS_BYTES * (rates.adamw_weights_per_s or 0.0) or bytes_per_s
        moments_bytes_per_s = BF16_PASS_BYTES * (rates.adamw_moments_per_s or 0.0) or bytes_per_s
        return group.pass_bytes / weights_bytes_per_s, group.pass_bytes / moments_bytes_per_s
    by_bytes_s = group.update_bytes / BF16_UPDATE_BYTES / rates.adamw_per_s
    by_bytes_s *= _fp16_factor(group)
    coded = group.narrow if group.states == "8bit" and rates.adamw_8bit_per_s else 0
    return max(by_bytes_s, coded / (rates.adamw_8bit_per_s or 1.0)), 0.0


def rate_of_update(group: GroupFacts, seconds: float, *, one_pass: bool = False) -> float:
    """The rate with which `host_update` gives `seconds` for this group: of AdamW with 8-bit states
    where it has those, or of `one_pass` of two."""
    if one_pass:
        return group.pass_bytes / BF16_PASS_BYTES / seconds
    if group.states == "8bit" and group.narrow:
        return group.narrow / seconds
    return group.update_bytes / BF16_UPDATE_BYTES / seconds * _fp16_factor(group)


def _fp16_factor(group: GroupFacts) -> float:
    return 1 + FP16_CONVERSION * group.trained_fp16 / max(1, group.trained)


@dataclass(frozen=True)
class Start:
    """What the forward's first computation waits for, where the embedding is on the host."""

    update_s: float = 0.0  # of the embedding
    copy_s: float = 0.0  # of it, or of the rows that are looked up


def start_of(facts: ModelFacts, layout: Layout, rates: Rates) -> Start:
    """Of a layout."""
    first, on_host = facts.groups[0], by_tier(facts, layout)[1]
    if first not in on_host or first.kind == "block":
        return Start()
    update_s = host_update(first, layout, rates)[0]
    by_rows = rows_of_table(facts, layout, on_host)
    if by_rows is None or by_rows.table is not first:
        return Start(update_s, first.weight_bytes / rates.up)
    return Start(update_s, by_rows.weight_bytes / rates.up)


def moments_end(
    facts: ModelFacts, layout: Layout, rates: Rates, computing_s: float, begins_s: float
) -> float:
    """Seconds that a backward pass of `computing_s` takes beside AdamW on the host, which begins
    after `begins_s` (less than 0: before it) with what the pass will overwrite: deferred moments,
    the last group's first.

    Where a group's gradients are downloaded, the thread that queues the computation waits for its
    moments.
    What comes after, blocks that live on the device too, is computed then.
    """
    on_host = {id(group) for group in by_tier(facts, layout)[1]}
    block_s = computing_s / max(1, facts.layers)
    end_s, done_s = 0.0, begins_s
    chunked = chunked_head(facts, layout, by_tier(facts, layout)[1])
    first = [chunked.group] if chunked else []  # its gradients are downloaded before the others'
    for group in (*first, *(group for group in reversed(facts.groups) if group not in first)):
        end_s += block_s if group.kind == "block" else 0.0
        moments_s = host_update(group, layout, rates)[1] if id(group) in on_host else 0.0
        if moments_s:
            done_s += moments_s
            end_s = max(end_s, done_s)
    return end_s


def computing(backward: Mapping[str, float]) -> float:
    """Seconds in which a backward pass computes its blocks one after the other, with nothing on the
    host that holds it up."""
    held_up_s = backward.get("slots", 0.0)
    return max(backward["compute"], backward["uploads"], backward["queueing"], held_up_s)


@dataclass(frozen=True)
class BackwardUpdateWaits:
    """A step in backward's backward phase, and seconds from its end until what the forward needs is
    updated."""

    backward_s: float
    start_s: float  # an embedding on the host
    others_s: float  # every other group on the host


def waits_in_backward(
    facts: ModelFacts, layout: Layout, rates: Rates, backward: Mapping[str, float]
) -> BackwardUpdateWaits:
    """Gradients are there from the loss on for what comes after the blocks, then evenly over the
    blocks in reverse, and the embedding's last. Each group's are downloaded after those before, and
    are used as soon as the update before has ended. They pass through a few buffers
    (`ring_depth`): where all are lent, the thread that queues the computation waits for the update
    that used the oldest.
    """
    block_s = computing(backward) / max(1, facts.layers)
    on_host = by_tier(facts, layout)[1]
    host_ids, by_rows = {id(group) for group in on_host}, rows_of_table(facts, layout, on_host)
    lent = _Lent()
    computed_s = arrived_s = updated_s = start_s = others_s = 0.0
    for group in reversed(facts.groups):
        computed_s += block_s if group.kind == "block" else 0.0
        if id(group) not in host_ids or not group.trained:
            continue
        rows = by_rows if by_rows is not None and by_rows.table is group else None
        size = rows.gradient_bytes if rows is not None and not rows.tied else group.rounded_bytes
        computed_s = max(computed_s, lent.free_s(group))
        arrived_s = max(arrived_s, computed_s) + size / rates.down_both
        updated_s = max(updated_s, arrived_s) + host_update(group, layout, rates)[0]
        lent.until(group, updated_s)
        if group is facts.groups[0] and group.kind != "block":
            start_s = updated_s
        else:
            others_s = updated_s
    ended_s = max(computed_s, *backward.values())
    return BackwardUpdateWaits(ended_s, *(max(0.0, s - ended_s) for s in (start_s, others_s)))


class _Lent:
    """Buffers for gradients on the host, by size, and when the update of what each holds has
    ended."""

    def __init__(self) -> None:
        self._ends_s: dict[tuple[int, ...], list[float]] = {}

    def free_s(self, group: GroupFacts) -> float:
        """When there is one for `group`."""
        ends_s, depth = self._of(group), ring_depth(group.rounded_bytes)
        return ends_s[-depth] if len(ends_s) >= depth else 0.0

    def until(self, group: GroupFacts, end_s: float) -> None:
        """`group` has had one until then."""
        self._of(group).append(end_s)

    def _of(self, group: GroupFacts) -> list[float]:
        alike = (group.trained_bf16, group.trained_fp16, group.trained_fp32)
        return self._ends_s.setdefault(alike, [])


def forward_after_backward_updates(
    facts: ModelFacts,
    layout: Layout,
    rates: Rates,
    forward: Mapping[str, float],
    waits: BackwardUpdateWaits,
) -> dict[str, float]:
    """Seconds of a step in backward's forward phase after its backward phase, by what takes
    them."""
    start = start_of(facts, layout, rates)
    others_s = waits.others_s - _before_awaited(facts, layout, forward["compute"])
    later_s = max(0.0, waits.start_s + start.copy_s, others_s)
    return {
        **forward,
        **({"slots": forward["slots"] + later_s} if "slots" in forward else {}),
        "compute": forward["compute"] + later_s,
        "uploads": forward["uploads"] + max(waits.start_s, waits.others_s),
    }


def work_in_backward(facts: ModelFacts, layout: Layout, rates: Rates, forward_s: float) -> float:
    """Seconds of a step in backward's AdamW that only its backward phase can hide: not what blocks
    on
    the device hide."""
    on_host = by_tier(facts, layout)[1]
    update_s = sum(host_update(group, layout, rates)[0] for group in on_host)
    return update_s - _before_awaited(facts, layout, forward_s)


def _before_awaited(facts: ModelFacts, layout: Layout, forward_s: float) -> float:
    """Seconds of the forward pass, once the embedding is there, before it needs other weights that
    the host updates."""
    updated = {id(group) for group in by_tier(facts, layout)[1] if group.trained}
    groups = facts.groups[1:] if facts.groups[0].kind == "edge" else facts.groups
    before = takewhile(lambda group: id(group) not in updated, groups)
    return forward_s * sum(group.kind == "block" for group in before) / max(1, facts.layers)


def forward_after_updates(
    facts: ModelFacts, layout: Layout, rates: Rates, forward_s: float, awaited_s: float
) -> dict[str, float]:
    """Seconds from the first update to the end of the forward pass, which waits for `awaited_s` of
    updates, by what takes the most of them. For each group: it is updated, copied when those
    before it are, then computed with, and so is all that follows."""
    block_s = forward_s / max(1, facts.layers)
    on_host = by_tier(facts, layout)[1]
    chunked = chunked_head(facts, layout, on_host)
    waited = [group for group in on_host if group.trained and group is not facts.table]
    host_ids = {id(group) for group in waited}
    ends_s = {"compute": 0.0, "uploads": 0.0, "update": awaited_s}
    following_s = copies_s = 0.0
    for group in reversed(facts.groups):
        following_s += block_s if group.kind == "block" else 0.0
        if id(group) not in host_ids:
            continue
        first_bytes = chunked.chunk_bytes if chunked and group is chunked.group else None
        copy_s = (first_bytes or group.weight_bytes) / rates.up
        copies_s += copy_s
        parts_s = {"compute": following_s, "uploads": copies_s, "update": awaited_s}
        most = max(parts_s, key=lambda name: parts_s[name])
        ends_s[most] = max(ends_s[most], awaited_s + max(copies_s, copy_s + following_s))
        awaited_s -= host_update(group, layout, rates)[0]
        host_ids.remove(id(group))
    return ends_s
