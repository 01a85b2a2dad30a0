"""The layout by the time model: the fastest predicted one below a limit that a frontier sets.

    placement = place_timed(facts, capacity, request, Timing(rates=...))

Every layout that fits is compared (`ranked.Frontier`), so that more memory never makes the choice
slower: the layouts that fit before still do. Where no GPU has memory of its own, or `max` is asked
for by name, the rule of `placement` decides, and so it does what is refused and in which words.

Batch: of the powers of two up to the rule's own, the smallest that reaches nearly the tokens a
second of the best. Beyond it the copies are hidden, and a larger batch only means fewer updates.
Beside frozen weights the smallest is enough whose computation takes `HIDDEN_TIMES` as long as its
copies, unless it is much slower: adapters are mostly trained on little data, in few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fluxtrain.events.choices import setting_name
from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.choices.activations import staying_words
from fluxtrain.plan.choices.placement import Placement, place, placement_of
from fluxtrain.plan.choices.ranked import Frontier, TimedLayout
from fluxtrain.plan.choices.reasons import asked_to_keep, embedding_choice, head_choice
from fluxtrain.plan.cost.moments import moments_choice
from fluxtrain.plan.cost.prefetch import prefetch_choice, without_times
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import passes_s
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.footprint import Layout, head_copied, kept_count, slot_count
from fluxtrain.plan.heads import CHUNKS_GAIN
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import Search
from fluxtrain.units import bytes_text, count_text, duration_text

_KEEPS_NONE = "every block computes its activations again: no room is left to keep them"
_KEEPS_UNTRIED = "what a block that keeps its activations takes was not tried: training does"
HIDDEN_SHARE = 0.95  # of the best batch's tokens a second
ADAPTERS_SHARE = 0.9  # the same of adapters, where the copies are hidden twice over
HIDDEN_TIMES = 2.0  # the computation against the copies: one slow transfer delays nothing


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What layouts are timed with, and how much of the device they may take."""

    rates: Rates
    clips: bool = True
    passes: int = 1
    share: float = 1.0  # 1: all that may be used; 0: the least that runs


def place_timed(
    facts: ModelFacts, capacity: Capacity, request: RunRequest, timing: Timing | None
) -> Placement:
    """Decide for rows as `facts.row` says; `timing` None leaves it to the rule.

    Raises as `place` does.
    """
    ruled = place(facts, capacity, request)
    if timing is None or not capacity.has_gpu or request.offload == "max":
        return ruled
    batches = [ruled.batch_rows]
    if request.batch_rows is None:
        batches = [ruled.batch_rows >> shift for shift in range(ruled.batch_rows.bit_length())]
    frontiers = {rows: _frontier(facts, capacity, request, timing, rows) for rows in batches}
    stops = {
        rows: frontier.at(timing.share)
        for rows, frontier in frontiers.items()
        if frontier.candidates
    }
    if not stops:
        return ruled
    batch = _smallest_batch(facts, stops)
    chosen, frontier = stops[batch], frontiers[batch]
    return placement_of(
        facts,
        chosen.layout,
        chosen.need,
        budget_bytes=ruled.budget_bytes,
        choices=_choices(
            frontier, chosen, timing.share, _batch_reason(facts, request, stops, batch)
        ),
    )


def _smallest_batch(facts: ModelFacts, stops: dict[int, TimedLayout]) -> int:
    """Choose the fewest rows that lose next to nothing of the best batch's throughput."""
    best = max(stop.cost.tokens_per_s for stop in stops.values())

    def enough(stop: TimedLayout) -> bool:
        hidden = trains_adapters(facts) and _hidden_times(stop) >= HIDDEN_TIMES
        return stop.cost.tokens_per_s >= best * (ADAPTERS_SHARE if hidden else HIDDEN_SHARE)

    return min(rows for rows, stop in stops.items() if enough(stop))


def trains_adapters(facts: ModelFacts) -> bool:
    """Are most weights of the blocks frozen, as beside adapters?"""
    return sum(n * group.frozen for group, n in facts.blocks.alike) > facts.blocks.trained


def _hidden_times(stop: TimedLayout) -> float:
    """How many times as long as the uploads the computation takes; infinite without uploads."""
    found = stop.cost
    copies_s = found.upload_forward_s + found.upload_backward_s
    computing_s = found.forward_s + found.head_s + found.backward_s
    return computing_s / copies_s if copies_s else float("inf")


def _frontier(
    facts: ModelFacts, capacity: Capacity, request: RunRequest, timing: Timing, rows: int
) -> Frontier:
    search = Search(facts, capacity, replace(request, batch_rows=rows))
    return Frontier(search, timing.rates, clips=timing.clips, passes=timing.passes)


def _batch_reason(
    facts: ModelFacts, request: RunRequest, stops: dict[int, TimedLayout], batch: int
) -> str:
    if request.batch_rows is not None:
        return "as set"
    told = count_text(round(stops[batch].cost.tokens_per_s))
    larger, smaller = stops.get(batch * 2), stops.get(batch // 2)
    if larger is not None:
        more = count_text(round(larger.cost.tokens_per_s))
        times = _hidden_times(stops[batch])
        if trains_adapters(facts) and times >= HIDDEN_TIMES:
            share = (
                f"takes {times:.1f} times as long as its"
                if times < float("inf")
                else "waits for no"
            )
            return (
                f"{told} tokens/s: the computation {share} copies, so the bus needs no larger "
                f"batch; {batch * 2} rows make {more}, with half as many updates"
            )
        return f"{told} tokens/s, and {batch * 2} rows only {more}: the copies are hidden"
    if smaller is not None:
        less = count_text(round(smaller.cost.tokens_per_s))
        return (
            f"the most that fits or is chosen by itself; {told} tokens/s, {batch // 2} rows {less}"
        )
    return "no other batch fits"


def _choices(
    frontier: Frontier, chosen: TimedLayout, share: float, batch_because: str
) -> tuple[ChoiceMade, ...]:
    """Every choice with what the best layout without it would take."""
    limit = frontier.limit_bytes(share)
    within = frontier.within(share)
    layout, seconds = chosen.layout, duration_text(chosen.cost.step_s)
    offload = (
        f"{seconds} a step, the fastest predicted of {len(within)} layouts within "
        f"{bytes_text(limit)} of device memory; bound by {chosen.cost.binds}"
    )

    def because(name: str, value: object) -> str:
        asked = getattr(frontier.search.request, name)
        if asked is not None and asked != "auto":
            return (
                asked_to_keep(frontier.search, layout)
                if name == "blocks_without_recompute"
                else "as set"
            )
        if name == "blocks_without_recompute" and not value:
            tried = frontier.rates.calibration
            known = tried is not None and tried.kept_backward is not None
            return _KEEPS_NONE if known else _KEEPS_UNTRIED
        others = [one for one in within if getattr(one.layout, name) != value]
        if not others:
            return "nothing else fits"
        alike = [one for one in others if name == "head" or one.layout.head == layout.head]
        other = frontier.fastest(alike or others)
        with_it = duration_text(other.cost.step_s)
        return f"{seconds} a step is predicted, and {with_it} with {getattr(other.layout, name)}"

    told = {
        "offload": (layout.offload, "as set" if _is_set(frontier) else offload),
        "device_groups": (layout.device_groups, because("device_groups", layout.device_groups)),
        "device_first": (layout.device_first, because("device_first", layout.device_first)),
        "resident_blocks": (
            layout.resident_blocks,
            because("resident_blocks", layout.resident_blocks),
        ),
        "blocks_without_recompute": (
            kept_count(frontier.search.facts, layout),
            because("blocks_without_recompute", layout.blocks_without_recompute),
        ),
        "activations": _activations(frontier, layout, because("activations", layout.activations)),
        "batch_rows": (layout.batch_rows, batch_because),
        "chunk_rows": (layout.chunk_rows, because("chunk_rows", layout.chunk_rows)),
    }
    moments_set = frontier.search.request.deferred_moments is not None
    return (
        *(
            ChoiceMade(name=setting_name(name), value=str(value), because=why)
            for name, (value, why) in told.items()
        ),
        *embedding_choice(frontier.search, layout),
        *_head_choice(frontier, layout, because),
        moments_choice(frontier.search.facts, layout, frontier.cost_of, is_set=moments_set),
        *_prefetch_choice(frontier, layout),
    )


def _prefetch_choice(frontier: Frontier, layout: Layout) -> tuple[ChoiceMade, ...]:
    facts, slots = frontier.search.facts, slot_count(frontier.search.facts, layout)
    if not slots or frontier.search.request.slots is not None:
        return without_times(facts, layout)
    forward_s, _, backward_s = passes_s(facts, layout, frontier.rates)
    fewer_s, step_s, more_s = (
        frontier.cost_of(replace(layout, slots=some)).step_s
        for some in (slots - 1, slots, slots + 1)
    )
    seconds, steps_s = (forward_s, backward_s), (fewer_s, step_s, more_s)
    return prefetch_choice(facts, layout, frontier.rates, seconds, steps_s)


def _activations(frontier: Frontier, layout: Layout, because: str) -> tuple[str, str]:
    """Where they wait and why, with how many stay on the device all the same."""
    if layout.offload == "max":
        because = "max has them on the host"
    staying = staying_words(frontier.search.facts, layout)
    where = "host" if layout.offloads_activations else "device"
    return where, "; ".join(filter(None, (because, staying)))


def _head_choice(
    frontier: Frontier, layout: Layout, because: Callable[[str, object], str]
) -> tuple[ChoiceMade, ...]:
    """With the time that the other way takes, where the head is on the host and it was compared."""
    told = head_choice(frontier.search, layout)
    compared = len(frontier.search.heads) > 1 and frontier.rates.has_gpu
    on_host = head_copied(frontier.search.facts, replace(layout, head="chunks")) == "chunks"
    if not (compared and on_host):
        return told
    why = because("head", layout.head)
    if layout.head == "whole":
        why += f"; chunks are taken where they are predicted to be {CHUNKS_GAIN - 1:.0%} faster"
    return tuple(ChoiceMade(name=one.name, value=one.value, because=why) for one in told)


def _is_set(frontier: Frontier) -> bool:
    return frontier.search.request.offload != "auto"
