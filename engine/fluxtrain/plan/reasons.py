"""Why cards, blocks and layouts were chosen, or none was, in words with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fluxtrain.events.events import CardLeftOut, ChoiceMade, setting_name
from fluxtrain.plan.capacity import CardsCapacity, DiskHome
from fluxtrain.plan.dealing import EDGES_CARD
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    embedding_copied,
    footprint,
    head_copied,
    keepable_count,
    kept_count,
    offloading_blocks,
    on_disk,
    slot_count,
    spill_bytes,
    spilled,
    streamed,
    streamed_count,
    trained_on_disk,
)
from fluxtrain.plan.group_placement import table_of
from fluxtrain.plan.heads import CHUNKS_GAIN, comes_apart
from fluxtrain.plan.heads import reason as head_reason
from fluxtrain.plan.placement import CardLayout, Option
from fluxtrain.plan.request import ParallelRequest, PlacementRequest, RunRequest
from fluxtrain.plan.search import (
    BATCH_LIMIT_ROWS,
    CHUNK_TOKENS,
    Search,
    TimedLayout,
    TimedSearch,
)
from fluxtrain.plan.tables import reason as embedding_reason
from fluxtrain.units import GIB, bytes_text, count_text, duration_text, rate_text

SHORTEST_TOKENS = 32  # nobody is told to train on less
HIDDEN_TIMES = 2.0  # the computation against the copies: one slow transfer delays nothing
WEIGHTS_ON_DISK = "weights on disk"  # no setting
STATES_ON_DISK = "states on disk"
ON_DISK = (WEIGHTS_ON_DISK, STATES_ON_DISK)
RATED_WRITES = 600  # of its size, that a drive is rated for where its data sheet is not at hand
_DAY_S = 24 * 3600
DEFERRED, WITH_WEIGHTS = "deferred", "with_weights"
_HOST_BOUND = ("update", "host memory")
_KEEPS_NONE = "every block computes its activations again: no room is left to keep them"
_KEEPS_UNTRIED = "what a block that keeps its activations takes was not tried: training does"

_AUTO: dict[str, Any] = vars(RunRequest())
_PLACEMENT = tuple(vars(PlacementRequest()))
# Settings that may be left out, one after another, those first that cost the least
_EASIER: tuple[tuple[str, ...], ...] = (
    ("chunk_rows",),
    ("blocks_without_recompute",),
    ("prefetch",),
    ("resident_blocks",),
    ("device_groups",),
    ("device_groups", "resident_blocks"),
    ("offload",),
    ("batch_rows",),
    ("passes",),
    ("budget_gib",),
    _PLACEMENT,
    (*_PLACEMENT, "batch_rows"),
)

Reasons = dict[str, tuple[object, str]]  # of each choice: its value and why


def choices_of(
    parallel: ParallelRequest,
    capacities: CardsCapacity,
    request: RunRequest,
    options: Sequence[Option],
    best: Option,
) -> tuple[ChoiceMade, ...]:
    """Return every choice with its reason."""
    first = best.cards[EDGES_CARD]
    found: Reasons = {}
    if len(capacities.cards) > 1:
        found["parallel.cards"] = len(best.cards), _cards(parallel, options, best)
    if len(best.cards) > 1:
        found["parallel.dealing"] = _counts(best), _dealing_because(parallel, best)
        found["parallel.order"] = _order(parallel, options, best)
        kept = "; ".join(map(_kept_on_card, best.cards))
        found["offload"] = best.layout.offload, kept
        found |= _chunks_of_cards(request, options, best)
    elif first.timed is not None:
        found |= _timed_choices(first, first.timed)
    else:
        found |= _ruled_choices(first.search, best.layout)
    if best.dealt.facts.row is not None:
        asked = replace(first.search.request, batch_rows=request.batch_rows)
        why = _batch(replace(first.search, request=asked), best.layout)
        if request.batch_rows is None and best.time is not None:
            why = _timed_batch(options, best)
        found["batch_rows"] = best.layout.batch_rows, "as set" if request.batch_rows else why
    return (
        *(
            ChoiceMade(name=setting_name(name), value=str(value), because=why)
            for name, (value, why) in found.items()
        ),
        *embedding_choice(first.search, first.layout),
        *_head_choice(first, best),
        *_moments_choice(request, best),
        *_disk_choice(best),
        *_states_choice(best),
        *(_slots_choice(first) if len(best.cards) == 1 else ()),
    )


# -- one card ----------------------------------------------------------------------------------


def _ruled_choices(search: Search, layout: Layout) -> Reasons:
    """Return the reasons of the rule that knows no times; rows only where they are known."""
    found: Reasons = {
        "offload": (layout.offload, _offload(search, layout)),
        "device_groups": (layout.device_groups, _device_groups(search, layout)),
        "resident_blocks": (layout.resident_blocks, _resident_blocks(search, layout)),
    }
    if search.request.blocks_without_recompute != "auto":
        kept = kept_count(search.facts, layout)
        found["blocks_without_recompute"] = (kept, asked_to_keep(search, layout))
    if staying := staying_words(search.facts, layout):
        found["activations"] = ("host", staying)
    if search.facts.row is not None:
        tokens = layout.chunk_rows * search.facts.row.sequence_length
        found["chunk_rows"] = (layout.chunk_rows, _chunk(search, layout, tokens))
    return found


def _timed_choices(one: CardLayout, timed: TimedSearch) -> Reasons:
    """Return every choice of one card, with the seconds of the best layout without it."""
    layout, facts = one.layout, one.facts
    kept = kept_count(facts, layout)
    found: Reasons = {
        name: (getattr(layout, name), _faster_than(one, timed, name))
        for name in ("device_groups", "device_first", "resident_blocks", "chunk_rows")
    }
    seconds = duration_text(timed.time_of(layout).step_s)
    limit = bytes_text(timed.limit_bytes(one.share))
    offload = (
        f"{seconds} a step, the fastest predicted of {len(timed.timed)} layouts within {limit} of "
        f"device memory; bound by {timed.time_of(layout).binds}"
    )
    if one.search.request.offload != "auto":
        offload = "as set"
    keeps = _faster_than(one, timed, "blocks_without_recompute")
    tried = timed.rates.calibration
    if one.search.request.blocks_without_recompute != "auto":
        keeps = asked_to_keep(one.search, layout)
    elif not kept:
        known = tried is not None and tried.kept_backward is not None
        keeps = _KEEPS_NONE if known else _KEEPS_UNTRIED
    where = "host" if layout.offloads_activations else "device"
    inputs = _faster_than(one, timed, "activations")
    if layout.offload == "max":
        inputs = "max has them on the host"
    inputs = "; ".join(filter(None, (inputs, staying_words(facts, layout))))
    return {
        "offload": (layout.offload, offload),
        **found,
        "blocks_without_recompute": (kept, keeps),
        "activations": (where, inputs),
    }


def _faster_than(one: CardLayout, timed: TimedSearch, name: str) -> str:
    """Compare with the fastest timed layout that has another value of a setting."""
    asked, layout = getattr(one.search.request, name), one.layout
    if asked is not None and asked != "auto":
        return "as set"
    other = _otherwise(one, timed, name)
    if other is None:
        return "nothing else fits"
    seconds, with_it = (
        duration_text(step_s) for step_s in (timed.time_of(layout).step_s, other.time.step_s)
    )
    return f"{seconds} a step is predicted, and {with_it} with {getattr(other.layout, name)}"


def _otherwise(one: CardLayout, timed: TimedSearch, name: str) -> TimedLayout | None:
    value = getattr(one.layout, name)
    others = [other for other in timed.timed.values() if getattr(other.layout, name) != value]
    alike = [other for other in others if name == "head" or other.layout.head == one.layout.head]
    return min(alike or others, key=timed.preference, default=None)


def _timed_batch(options: Sequence[Option], best: Option) -> str:
    """Say why the batch is no larger and no smaller."""
    rows = best.layout.batch_rows
    alike = {one.layout.batch_rows: one for one in options if one.positions == best.positions}
    larger, smaller = alike.get(rows * 2), alike.get(rows // 2)
    speed = count_text(round(best.tokens_per_s))
    if larger is not None:
        more = count_text(round(larger.tokens_per_s))
        times = best.times_the_copies
        if trains_adapters(best.dealt.facts) and times >= HIDDEN_TIMES:
            share = "waits for no" if times == float("inf") else (
                f"takes {times:.1f} times as long as its"
            )  # fmt: skip
            return (
                f"{speed} tokens/s: the computation {share} copies, so the bus needs no larger "
                f"batch; {rows * 2} rows make {more}, with half as many updates"
            )
        return f"{speed} tokens/s, and {rows * 2} rows only {more}: the copies are hidden"
    if smaller is not None:
        less = count_text(round(smaller.tokens_per_s))
        return f"the most that fits or auto takes; {speed} tokens/s, {rows // 2} rows {less}"
    return "no other batch fits"


def trains_adapters(facts: ModelFacts) -> bool:
    """Return whether most weights of the blocks are frozen, as with adapters."""
    return sum(n * group.frozen for group, n in facts.blocks.alike) > facts.blocks.trained


def staying_words(facts: ModelFacts, layout: Layout) -> str:
    """Name the block inputs that stay on the device where the others wait on the host; "" where
    all wait."""
    row, offloaded = facts.row, offloading_blocks(facts, layout)
    stay = facts.layers - kept_count(facts, layout) - offloaded
    if row is None or not (layout.offloads_activations and layout.activations_on_device and stay):
        return ""
    stay_bytes = stay * layout.batch_rows * row.block_input_bytes
    return (
        f"inputs of the last {stay} of {stay + offloaded} blocks stay on the device, in "
        f"{bytes_text(stay_bytes)} that were left"
    )


def _head_choice(one: CardLayout, best: Option) -> tuple[ChoiceMade, ...]:
    """Return how the head is copied, with the time that the other way takes where it was tried."""
    found, timed, layout = head_choice(one.search, one.layout), one.timed, one.layout
    compared = timed is not None and len(one.search.heads) > 1 and len(best.cards) == 1
    on_host = head_copied(one.facts, replace(layout, head="chunks")) == "chunks"
    if timed is None or not compared or not on_host:
        return found
    why = _faster_than(one, timed, "head")
    if layout.head == "whole":
        why += f"; chunks are taken where they are predicted to be {CHUNKS_GAIN - 1:.0%} faster"
    return tuple(ChoiceMade(name=one.name, value=one.value, because=why) for one in found)


def _moments_choice(request: RunRequest, best: Option) -> tuple[ChoiceMade, ...]:
    """Return when AdamW's moments are updated: with the weights, or after all of them."""
    deferred, is_set = best.layout.deferred_moments, request.deferred_moments is not None
    ruled = len(best.cards) == 1 and best.cards[EDGES_CARD].timed is None
    if (best.time is None or ruled) and not is_set:
        return ()
    alone = _no_moments_wait(best)
    if best.layout.optimizer_in_backward:
        because = "each group is updated at once, as its gradients arrive"
    elif is_set:
        because = f"as set, without effect: {alone}" if deferred and alone else "as set"
    else:
        because = alone or _moments_because(best)
    value = DEFERRED if deferred else WITH_WEIGHTS
    return (ChoiceMade(name="train.moments", value=value, because=because),)


def _moments_because(best: Option) -> str:
    first, deferred = best.cards[EDGES_CARD], best.layout.deferred_moments
    if first.timed is None or len(best.cards) > 1:
        return "a step is predicted to be shorter" if deferred else "no gain is predicted otherwise"
    now, other = (
        first.timed.time_of(replace(first.layout, deferred_moments=late))
        for late in (deferred, not deferred)
    )
    step, instead = duration_text(now.step_s), duration_text(other.step_s)
    if not deferred:
        return f"{step} a step is predicted, and {instead} deferred, which moves more bytes"
    weights, whole = (duration_text(one.parts_s["host_update"]) for one in (now, other))
    return (
        f"{step} a step is predicted, and {instead} with the weights: the next forward waits "
        f"for {weights} of AdamW on the host in place of {whole}"
    )


def _no_moments_wait(best: Option) -> str:
    """Explain why no moments can be updated later; "" where some can."""
    on_host = [g for one in best.cards for g in by_tier(one.facts, one.layout)["host"] if g.trained]
    if not on_host:
        return "no trained weights are on the host"
    if not any(group.pass_bytes for group in on_host):
        return "fp16 masters, and moments in fewer bits than fp32, are updated with the weights"
    return ""


def _slots_choice(one: CardLayout) -> tuple[ChoiceMade, ...]:
    """Return how many blocks are copied ahead, where blocks stream."""
    facts, layout = one.facts, one.layout
    slots = slot_count(facts, layout)
    if not slots:
        return ()
    ahead, asked = max(1, slots - 1), one.search.request.slots
    if asked is not None:
        wanted = max(1, asked - 1)
        because = "as set"
        if wanted > ahead:
            because = f"{wanted} as set, and {streamed_count(facts, layout)} blocks stream"
        elif wanted < ahead:
            because = f"{wanted} as set, and parts that compute with {facts.groups_at_once} blocks "
            because += f"at once need {slots} slots"
    elif one.timed is None:
        because = f"{slots} slots for blocks that stream, as {layout.offload} has where no times "
        because += "choose"
    else:
        because = _slots_because(one, one.timed, slots)
    return (ChoiceMade(name="placement.prefetch", value=str(ahead), because=because),)


def _slots_because(one: CardLayout, timed: TimedSearch, slots: int) -> str:
    facts, layout = one.facts, one.layout
    slot_bytes = streamed(layout, by_tier(facts, layout)["host"]).largest_weight_bytes
    copy = duration_text(slot_bytes / timed.rates.up)
    parts_s = timed.time_of(layout).parts_s
    each = (parts_s[name] / timed.passes / facts.layers for name in ("forward", "backward"))
    computing = " and ".join(map(duration_text, each))
    beside = f"a block's copy takes {copy}, its forward and backward {computing}"
    if layout.offload == "max":
        return f"max streams through {slots} slots; {beside}"
    step_s, other_s = (
        timed.time_of(replace(layout, slots=some)).step_s for some in (slots, slots + 1)
    )
    gain = "no gain" if other_s >= step_s else f"{duration_text(step_s - other_s)} less a step"
    return f"{beside}; one more would take {bytes_text(slot_bytes)} for {gain}"


def _disk_choice(best: Option) -> tuple[ChoiceMade, ...]:
    """Say which frozen weights live on disk, and what that costs; nothing where none do."""
    away = [g for one in best.cards for g in on_disk(one.facts, one.layout)]
    if not away:
        return ()
    search, passes = best.cards[EDGES_CARD].search, best.layout.passes
    home, limit = search.disk, search.limits.host_bytes
    assert home is not None and limit is not None, "weights go to disk where the host is too small"
    size = sum(group.file_bytes for group in away)
    held = sum(
        footprint(
            one.facts,
            replace(one.layout, disk_groups=0),
            has_gpu=one.search.capacity.has_gpu,
        ).host_bytes
        for one in best.cards
    )
    rows = [row for one in best.cards for row in table_of(one.facts, one.layout)]
    often = {row.name for row in rows if row.is_on("disk") and not row.resident}
    read = 2 * passes * sum(group.file_bytes for group in away if group.name in often)
    costs = "read in forward and backward, and never written"
    if home.read_bytes_per_s:
        timed_s = 0.0 if best.time is None else best.time.parts_s["disk_read"]
        seconds = duration_text(timed_s or read / home.read_bytes_per_s)  # the latter at most
        costs += f", which takes {seconds} of each step at the {rate_text(home.read_bytes_per_s)} "
        costs += "that the disk was measured to read"
    network = "; it is mounted over the network, which others share" if home.on_network else ""
    because = (
        f"the host may give {bytes_text(limit)} and would need {bytes_text(held)}: these "
        f"are the fewest blocks with which it suffices; their {bytes_text(size)} in {home.folder} "
        f"are {costs}{network}"
    )
    value = f"{len(away)} of {best.dealt.facts.layers} blocks"
    return (ChoiceMade(name=WEIGHTS_ON_DISK, value=value, because=because),)


def _states_choice(best: Option) -> tuple[ChoiceMade, ...]:
    """Say which groups' optimizer states live on disk, and what that costs; nothing where none
    do."""
    away = [g for one in best.cards for g in spilled(one.facts, one.layout)]
    if not away:
        return ()
    search = best.cards[EDGES_CARD].search
    limit, home = search.limits.host_bytes, search.spill
    assert home is not None
    size = sum(spill_bytes(one.facts, one.layout) for one in best.cards)
    twice = [g.weight_bytes for one in best.cards for g in trained_on_disk(one.facts, one.layout)]
    step_s = None if best.time is None else best.time.step_s
    because = (
        f"as set, the fewest with which the {bytes_text(limit)} that the host may give suffice"
        f"{_followers(best.layout)}: {_wear(home, size, step_s, 2 * sum(twice))}"
    )
    value = f"{len(away)} of {len(best.dealt.facts.groups)} groups"
    return (ChoiceMade(name=STATES_ON_DISK, value=value, because=because),)


def _followers(layout: Layout) -> str:
    """Say of how many blocks gradients and weights followed the states to disk."""
    counts = {"gradients": layout.disk_gradients, "weights": layout.disk_weights}
    told = [f"the {kind} of {count} blocks" for kind, count in counts.items() if count]
    return f", with {' and '.join(told)}" if told else ""


def _wear(
    home: DiskHome, size_bytes: int, step_s: float | None = None, weights_bytes: int = 0
) -> str:
    """Say what optimizer states on disk cost: seconds, and writes against what a drive is rated
    for. step_s: of a predicted step; None: no step is shorter than the disk's part. weights_bytes:
    what forward and backward read besides."""
    size, words = bytes_text(size_bytes), f"in {home.folder}"
    words = f"{size} are read and written each step {words}"
    if weights_bytes:
        words += f", and {bytes_text(weights_bytes)} read for forward and backward"
    read, write = home.read_bytes_per_s, home.write_bytes_per_s
    if read and write:
        disk_s = (size_bytes + weights_bytes) / read + size_bytes / write
        step_s = max(step_s or 0.0, disk_s)
        words += (
            f", {duration_text(disk_s)} at the {rate_text(read)} and {rate_text(write)} that the "
            f"disk was measured to read and write, and up to "
            f"{bytes_text(int(size_bytes * _DAY_S / step_s))} written a day"
        )
    if home.total_bytes:
        steps = count_text(RATED_WRITES * home.total_bytes // max(1, size_bytes))
        words += (
            f"; {steps} steps write as much as a drive of {bytes_text(home.total_bytes)} is rated "
            f"for at {RATED_WRITES} times its size (assumed: see its data sheet)"
        )
    return words + "; it is mounted over the network, which others share" * home.on_network


# -- several cards -----------------------------------------------------------------------------


def _cards(parallel: ParallelRequest, options: Sequence[Option], best: Option) -> str:
    """Explain the number of cards that compute."""
    if parallel.cards == "auto":
        number = len(best.cards)
        others = [
            f"{_predicted(other)} with {len(other.positions)}"
            for other in _best_of_each_number(options)
            if len(other.positions) in {1, number + 1} - {number}
        ]
        why = ", and ".join([f"{_predicted(best)} predicted", *others])
        if best.time is None:
            why = "every card that can be used: no times are known"
    else:
        why = "as set"
        asked = parallel.cards if isinstance(parallel.cards, int) else len(parallel.cards)
        if asked > len(best.cards):
            why = f"{asked} as set, and the model has {len(best.cards)} blocks"
    if len(best.cards) == 1:
        return why
    names = ", ".join(one.card.text for one in best.cards)
    return f"{names}: {why}{_what_would_help(best)}"


def cards_left_out(
    parallel: ParallelRequest,
    capacities: CardsCapacity,
    options: Sequence[Option],
    chosen: Option,
) -> tuple[CardLeftOut, ...]:
    """Return the cards of the machine that do not compute, each with its reason."""
    if not capacities.has_gpu and len(chosen.positions) == 1:
        return ()
    return tuple(
        CardLeftOut(
            index=card.index,
            name=card.name,
            because=card.unusable or _not_worth(parallel, options, chosen, at),
        )
        for at, card in enumerate(capacities.cards)
        if at not in chosen.positions
    )


def _not_worth(
    parallel: ParallelRequest, options: Sequence[Option], chosen: Option, at: int
) -> str:
    """Explain why a usable card does not compute."""
    layers = chosen.dealt.facts.layers
    few = layers <= len(chosen.positions)
    if parallel.cards != "auto" or isinstance(parallel.dealing, tuple):
        wanted = at < parallel.cards if isinstance(parallel.cards, int) else False
        if few and wanted:
            return f"the model has {_blocks(layers)}"
        return "as set with parallel.cards or parallel.dealing"
    tried = [one for one in _best_of_each_number(options) if at in one.positions]
    if not tried:
        return f"the model has {_blocks(layers)}" if few else "no layout with it fits"
    if chosen.time is None:
        return "no times are known"
    share = tried[0].tokens_per_s / chosen.tokens_per_s
    return f"{_predicted(tried[0])} predicted with it, {share:.0%} of the speed without"


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def _best_of_each_number(options: Iterable[Option]) -> list[Option]:
    found: dict[int, Option] = {}
    for option in options:
        number = len(option.positions)
        if number not in found or option.tokens_per_s > found[number].tokens_per_s:
            found[number] = option
    return list(found.values())


def _predicted(option: Option) -> str:
    return (
        f"{duration_text(option.step_s)} a step ({count_text(round(option.tokens_per_s))} tokens/s)"
    )


def _what_would_help(best: Option) -> str:
    """Name changes that would shorten a step where more cards do not."""
    if best.time is None or best.time.busiest not in _HOST_BOUND:
        return ""
    eight = all(g.states == "8bit" for g in best.dealt.facts.groups if g.trained)
    low_bit = "" if eight else ", train.states=8bit"
    return (
        f"; bound by AdamW and copies in host memory, which cards do not speed up: more rows a "
        f"step{low_bit} or more device memory would"
    )


def _counts(best: Option) -> str:
    counts = (best.dealt.cards.count(card) for card in range(len(best.cards)))
    return f"[{', '.join(map(str, counts))}]"


def _dealing_because(parallel: ParallelRequest, best: Option) -> str:
    if isinstance(parallel.dealing, tuple):
        return "as set, spread over the model"
    counts = {best.dealt.cards.count(card) for card in range(len(best.cards))}
    by: str = "speed" if parallel.dealing == "auto" else parallel.dealing
    if by == "speed" and best.time is None:
        by = "even numbers, for no times are known"
    if max(counts) - min(counts) <= 1:
        return f"by {by}: the blocks go to the cards in turn"
    return f"by {by}, as far as each card's memory holds its blocks, spread over the model"


def _order(parallel: ParallelRequest, options: Sequence[Option], best: Option) -> tuple[str, str]:
    order = "fast" if best.head_dealing == "summed" else "fixed"
    as_set = "as set: the bits of one card with the same chunks"
    if best.head_dealing != "one_card":
        beside = min(
            (
                one.step_s
                for one in _with_same_batch(options, best)
                if one.head_dealing == "one_card"
                and one.layout.chunk_rows == best.layout.chunk_rows
            ),
            default=best.step_s,
        )
        seconds = (
            f"{duration_text(best.step_s)} a step is predicted with the head on all cards, and "
            f"{duration_text(beside)} with it on one"
        )
        if order == "fast":
            return order, seconds
        why = as_set if parallel.order == "fixed" else "one card's order of sums is no slower"
        return order, f"{why}; {seconds}"
    if parallel.order == "fixed":
        return "fixed", as_set
    return "fixed", "the head on all cards would gain too little, or does not fit: one card has it"


def _with_same_batch(options: Iterable[Option], best: Option) -> list[Option]:
    """Return the options with the same cards and batch."""
    key = best.positions, best.layout.batch_rows
    return [one for one in options if (one.positions, one.layout.batch_rows) == key]


def _kept_on_card(one: CardLayout) -> str:
    """Describe what a card keeps in its memory."""
    layout, facts = one.layout, one.facts
    here = len(facts.groups) if layout.offload == "none" else layout.device_groups
    limit = one.budget_bytes
    room = "" if limit is None else f" of {bytes_text(limit)}"
    text = f"{one.card.text} has {here} of {len(facts.groups)} groups"
    if layout.resident_blocks and layout.offload != "none":
        text += f" and the weights of {layout.resident_blocks} more blocks"
    return f"{text}, {bytes_text(one.shown_bytes)}{room}"


def _chunks_of_cards(request: RunRequest, options: Sequence[Option], best: Option) -> Reasons:
    """Explain the number of chunks of a batch."""
    if best.dealt.facts.row is None:
        return {}
    layout, number = best.layout, len(best.cards)
    chunks = -(-layout.batch_rows // max(1, layout.chunk_rows))
    if request.chunk_rows != "auto":
        return {"chunk_rows": (layout.chunk_rows, f"as set: {chunks} chunks for {number} cards")}
    others = [
        one for one in _with_same_batch(options, best) if one.layout.chunk_rows != layout.chunk_rows
    ]
    why = f"{chunks} chunks keep {number} cards busy"
    if best.time is not None and others:
        other = min(others, key=lambda one: one.step_s)
        why += (
            f": {duration_text(best.step_s)} a step is predicted, and "
            f"{duration_text(other.step_s)} with {other.layout.chunk_rows}"
        )
    return {"chunk_rows": (layout.chunk_rows, why)}


# -- the rule, and what does not fit -------------------------------------------------------------


def embedding_choice(search: Search, layout: Layout) -> tuple[ChoiceMade, ...]:
    """Return how the embedding is copied; nothing where the model has no table and the user chose
    no way."""
    facts, request = search.facts, search.request
    if facts.table is None and request.embedding == "auto":
        return ()
    on_host = facts.table in by_tier(facts, layout)["host"]
    because = embedding_reason(facts, request, layout.batch_rows, on_host=on_host)
    copied = embedding_copied(facts, layout)
    return (ChoiceMade(name="placement.embedding", value=copied, because=because),)


def head_choice(search: Search, layout: Layout) -> tuple[ChoiceMade, ...]:
    """Return how the head is copied; nothing where it cannot be cut and the user chose no way."""
    facts, request = search.facts, search.request
    if request.head == "auto" and not comes_apart(facts):
        return ()
    names = {group.name for group in by_tier(facts, layout)["host"]}
    on_host = facts.head is not None and facts.head.group in names
    by_rows = embedding_copied(facts, layout) == "rows"
    because = head_reason(facts, request, layout.head, on_host=on_host, by_rows=by_rows)
    return (ChoiceMade(name="placement.head", value=head_copied(facts, layout), because=because),)


def without_effect(request: RunRequest, choices: Iterable[ChoiceMade]) -> list[str]:
    """Name the requested ways of copying that are not used, and the reason."""
    parts = {"placement.embedding": request.embedding, "placement.head": request.head}
    return [
        f"{choice.name.removeprefix('placement.')}={parts[choice.name]!r} has no effect: "
        f"{choice.because}"
        for choice in choices
        if choice.value == "whole" and parts.get(choice.name, "auto") in ("rows", "chunks")
    ]


OTHERWISE = "close other programs, or take a smaller model or a machine with more memory"


def refusal(search: Search) -> str:
    """Return the error with the memory needed, the memory available, and the first setting that
    would help."""
    layout = search.nearest()
    need, limits = search.need(layout), search.limits
    parts = [
        f"{bytes_text(needed)} of {name} memory and {bytes_text(limit)} may be used"
        for name, needed, limit in (
            ("device", need.device_bytes, limits.device_bytes),
            ("host", need.host_bytes, limits.host_bytes),
        )
        if limit is not None and needed > limit
    ]
    disk = "" if search.disk is None or not search.disk.unusable else f"; {search.disk.unusable}"
    return (
        f"the model does not fit: {_described(search, layout)} needs {', and '.join(parts)}: "
        f"{_cure(search)}{disk}{_with_states_on_disk(search)}"
    )


def _with_states_on_disk(search: Search) -> str:
    """Say what placement.disk=on would cost where the model would fit so, or why it cannot; ""
    where it would not help."""
    home, asked = search.spill, search.request.disk
    if home is None or asked == "off":
        return ""
    if asked == "on" or home.unusable:
        return f"; {home.unusable}" if asked == "on" and home.unusable else ""
    easier = replace(search, request=replace(search.request, disk="on"))
    layout = easier.find()
    if layout is None or not layout.disk_states:
        return ""
    size = spill_bytes(search.facts, layout)
    twice = 2 * sum(group.weight_bytes for group in trained_on_disk(search.facts, layout))
    name = "PlacementRequest(disk='on')" if search.facts.row is None else "placement.disk=on"
    return (
        f"; {name} fits with optimizer states of {layout.disk_states} groups on disk"
        f"{_followers(layout)}: {_wear(home, size, None, twice)}"
    )


def _described(search: Search, layout: Layout) -> str:
    name = "offload" if search.facts.row is None else "placement.offload"  # in `wrap`, in a run
    text = f"{name}={layout.offload}"
    if layout.device_groups and layout.offload != "none":
        text += f" with {layout.device_groups} of {len(search.facts.groups)} groups on the device"
    if search.facts.row is not None:
        text += f", {layout.batch_rows} rows in chunks of {layout.chunk_rows}"
    return text


def _cure(search: Search) -> str:
    request, row = search.request, search.facts.row
    own = search.facts.has_masters
    for names in _EASIER:
        easier = replace(request, **{name: _AUTO[name] for name in names})
        if not own:  # another package's optimizer has no states on the host
            easier = replace(easier, offload="none")
        if easier == request:
            continue
        layout = replace(search, request=easier).find()
        if layout is not None:
            value = _named(search, names, easier, layout)
            found = " left out fits" if value is None else f"={value} fits"
            return _told(names, in_run=row is not None) + found
    narrow = replace(search, facts=search.facts.with_states("8bit"))
    if not own:
        narrow = replace(narrow, request=replace(request, offload="auto"))
    layout = narrow.find()
    if layout is not None:
        need = narrow.need(layout)
        name = "states" if row is None else "train.states"
        with_own = "" if own else "train.optimizer=adamw with "
        return (
            f"{with_own}{name}=8bit fits: optimizer states of 8 bits "
            f"take {bytes_text(need.host_bytes)} of host memory"
        )
    if row is not None:
        length = row.sequence_length // 2
        while length >= SHORTEST_TOKENS:
            facts = replace(search.facts, row=row.of_length(length))
            if replace(search, facts=facts).find() is not None:
                return f"data.sequence_length={length} fits"
            length //= 2
    return _more_host(search) or OTHERWISE


def _more_host(search: Search) -> str:
    """Return how much the host's limit must be where the request sets it; "": it does not."""
    most, limit = search.capacity.host_available_bytes, search.limits.host_bytes
    needed = search.need(search.nearest()).host_bytes
    if most is None or most != search.request.host_bytes or not limit or needed <= limit:
        return ""
    name = "host_gib" if search.facts.row is None else "placement.host_gib"
    return f"set {name}={math.ceil(100 * needed * most / limit / GIB) / 100:g}, or leave it out"


def _told(names: tuple[str, ...], *, in_run: bool) -> str:
    """Return the settings by their names in a run's configuration, or in `wrap`."""
    if names[: len(_PLACEMENT)] == _PLACEMENT:
        if not in_run:
            return "every argument"
        return " and ".join([*map(_in_run, names[len(_PLACEMENT) :]), "all of placement"])
    return " and ".join(_in_run(name) if in_run else name for name in names)


def _in_run(name: str) -> str:
    return {"batch_rows": "train.batch_rows", "passes": "train.accumulation"}.get(
        name, f"placement.{name}"
    )


def _named(search: Search, names: tuple[str, ...], easier: RunRequest, layout: Layout) -> Any:
    """Return the setting's value in `layout` if changing only this setting fits too; None where it
    does not, or where it has no value."""
    if names not in {("chunk_rows",), ("offload",), ("batch_rows",), ("passes",)}:
        return None
    value = getattr(layout, names[0])
    asked = replace(easier, **{names[0]: value})
    return None if replace(search, request=asked).find() is None else value


def _offload(search: Search, layout: Layout) -> str:
    need = search.need(layout)
    if search.request.offload != "auto":
        return f"as set; takes {_room(search, layout)}"
    if layout.offload == "none":
        return f"takes {_room(search, layout, spare=True)}"
    takes = (
        f"{layout.offload} takes {bytes_text(need.device_bytes)} and "
        f"{bytes_text(need.host_bytes)} of host memory"
    )
    if layout.offload == "max":
        fewest = replace(search, request=replace(search.request, offload="weights")).nearest()
        return f"{_described(search, fewest)} would need {_room(search, fewest)}; {takes}"
    if not search.capacity.has_gpu:
        slots = slot_count(search.facts, layout)
        return f"without a GPU the blocks stream through {slots} buffers"
    everything = replace(layout, offload="none", resident_blocks=0)
    return f"none would need {_room(search, everything, spare=True)}; {takes}"


def _device_groups(search: Search, layout: Layout) -> str:
    groups = search.facts.groups
    if layout.offload == "none":
        return f"none has all {len(groups)} on the device"
    if search.request.device_groups != "auto":
        return _as_set(search.request.device_groups, layout.device_groups)
    if not search.capacity.has_gpu:
        return "without a GPU all memory is the host's: no group is updated elsewhere"
    if not search.fills(layout):
        return f"{layout.offload} has every group on the host"
    if layout.device_groups == len(groups):
        return f"all {len(groups)} fit"
    following = search.one_more_group(layout)
    before = by_tier(search.facts, layout)["device"]
    name = next(g.name for g in by_tier(search.facts, following)["device"] if g not in before)
    return (
        "their updates need no host memory and no copies; "
        f"{name} as well would need {_room(search, following, spare=True)}"
    )


def _resident_blocks(search: Search, layout: Layout) -> str:
    on_host = search.host_blocks(layout.device_groups, layout.device_first)
    if layout.offload == "none" or not on_host:
        return "every block lives on the device"
    if layout.offload == "optimizer":
        return f"optimizer keeps the weights of all {on_host} blocks on the device"
    if search.request.resident_blocks != "auto":
        return _as_set(search.request.resident_blocks, layout.resident_blocks)
    if not search.capacity.has_gpu:
        return "without a GPU all memory is the host's: a second copy saves nothing"
    if not search.fills(layout):
        return f"{layout.offload} streams every block"
    if layout.resident_blocks == on_host:
        return f"the weights of all {on_host} other blocks fit"
    one_more = replace(layout, resident_blocks=layout.resident_blocks + 1)
    return f"one more would need {_room(search, one_more, spare=True)}"


def _as_set(asked: int, taken: int) -> str:
    return "as set" if asked == taken else f"{asked} as set, and there are {taken}"


def asked_to_keep(search: Search, layout: Layout) -> str:
    """Return the reason for `kept_count` where a count was requested."""
    asked, keepable = search.request.blocks_without_recompute, keepable_count(search.facts, layout)
    if asked == "auto" or asked <= keepable:
        return "as set"
    return f"{asked} as set, and the weights of {keepable} blocks stay on the device"


def _batch(search: Search, layout: Layout) -> str:
    request = search.request
    if request.batch_rows is not None:
        return "as set"
    if layout.batch_rows == BATCH_LIMIT_ROWS:
        return f"{BATCH_LIMIT_ROWS} rows fit, and auto takes no more"
    if request.data_rows is not None and layout.batch_rows * 2 > request.data_rows:
        share = f" for each of {request.passes} backward passes" if request.passes > 1 else ""
        return f"the data has {request.data_rows} rows{share}, and each epoch needs a step"
    doubled = replace(request, batch_rows=layout.batch_rows * 2)
    if request.offload == "auto" and layout.offload != "max":
        doubled = replace(doubled, offload="weights")
    larger = replace(search, request=doubled)
    return f"{layout.batch_rows * 2} rows would need {_room(search, larger.nearest())}"


def _chunk(search: Search, layout: Layout, tokens: int) -> str:
    if search.request.chunk_rows != "auto":
        return "as set"
    if tokens * 2 <= CHUNK_TOKENS and layout.chunk_rows < layout.batch_rows:
        return f"{tokens} tokens at once; a larger chunk does not fit"
    return f"{tokens} tokens at once; about {CHUNK_TOKENS} keep a device busy"


def _room(search: Search, layout: Layout, *, spare: bool = False) -> str:
    """Say how much `layout` takes of the scarcer resource, and how much is available."""
    need, limits = search.need(layout), search.limits
    device_limit = limits.spare_bytes if spare else limits.device_bytes
    device = need.device_bytes / device_limit if device_limit else 0.0
    host = need.host_bytes / limits.host_bytes if limits.host_bytes else 0.0
    if host > device:
        return f"{bytes_text(need.host_bytes)} of {bytes_text(limits.host_bytes)} host memory"
    kept = ", which leaves the rest to activations" if spare and search.facts.row is None else ""
    return f"{bytes_text(need.device_bytes)} of {bytes_text(device_limit)} device memory{kept}"


def host_refusal(
    cards: int, needed: int, limit: int, narrow: int | None, *, may_spill: bool = False
) -> str:
    """Return the error of a host too small for all cards together, with settings that would help.
    `narrow`: bytes needed with 8-bit optimizer states; `may_spill`: states may go to a disk."""
    cure = OTHERWISE
    if narrow is not None and narrow <= limit:
        cure = f"train.states=8bit fits with {bytes_text(narrow)}"
    if may_spill:
        cure += (
            "; placement.disk=on fits with optimizer states on disk, which are written each step"
        )
    return (
        f"the model does not fit the host of {cards} cards: {bytes_text(needed)} of host "
        f"memory are needed and {bytes_text(limit)} may be used: {cure}"
    )
