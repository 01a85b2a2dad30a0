"""How many device slots the streamed blocks share, so how far ahead they are copied. Pure.

With `n` slots a block's copy begins when the block `n - 1` streamed ones before it begins to
compute: then the slot that it goes to is free, and it is asked for. Two slots hide every copy that
is no longer than what is computed between the beginnings of two streamed blocks, however late
AdamW on the host lets it begin: more slots let nothing begin sooner that is waited for. Where the
bus binds and every block streams, copies follow each other without a pause, and two are enough
again. Between the two, and where blocks on the device leave gaps of unlike length, a third slot
lets a short gap's copy begin in the longer one before; a fourth seldom adds to that.

A slot more also keeps one block more from the forward to the backward pass, which saves one copy.
A resident block saves the same copy for the same memory, and is counted elsewhere, so that is no
reason for a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    kept_count,
    offloading_blocks,
    slot_count,
    streamed,
    streamed_count,
)
from fluxtrain.units import bytes_text, duration_text

LOOKS_AHEAD = 16  # parts of the model, at most, for the next ones that are to be copied
FEWEST_SLOTS, MOST_SLOTS = 2, 5
WORTH = 0.005  # of forward and backward, that more slots have to save
# Copies of blocks in training beside the fastest: the deciles of 492 in recorded steps of one host
# (about the same of others, see docs/traces), in an order in which slow ones stand alone.
UNEVEN = (1.00, 1.51, 1.04, 1.29, 1.01, 1.71, 1.06, 1.38, 1.01, 1.20)
_MEAN = sum(UNEVEN) / len(UNEVEN)  # the rate of the bus is that of all of them


@dataclass(frozen=True)
class Pass:
    """Blocks in the order in which a pass computes them."""

    block_s: float  # to compute one of them
    copies_s: tuple[float, ...]  # to copy each; 0: nothing of it is copied
    shared: tuple[bool, ...]  # does it go through the slots that all share?


@lru_cache(maxsize=8192)
def pass_s(one: Pass, slots: int) -> float:
    """Seconds of a pass whose first copy is there, and whose others follow each other as early as
    so many slots let them, with the host ahead of the device by no block."""
    bus_s = now_s = 0.0
    began_s: list[float] = []  # of each block
    through: list[int] = []  # the shared slots: which blocks, so far
    first, ahead = True, max(1, slots - 1)
    for at, (copy_s, shared) in enumerate(zip(one.copies_s, one.shared, strict=True)):
        if copy_s and not first:
            after = at - LOOKS_AHEAD
            if len(through) >= ahead:
                after = max(after, through[-ahead])
            bus_s = max(bus_s, began_s[after] if after >= 0 else 0.0) + copy_s
            now_s = max(now_s, bus_s)
        first = first and not copy_s
        began_s.append(now_s)
        if shared:
            through.append(at)
        now_s += one.block_s
    return now_s


def passes_of(
    facts: ModelFacts, layout: Layout, rates: Rates, forward_s: float, backward_s: float
) -> tuple[Pass, Pass]:
    """The forward and the backward pass of a layout whose blocks compute for so long altogether,
    with copies as uneven as those of trainings. In the forward the updated weights of resident
    blocks are copied too, and in the backward the inputs of blocks that wait on the host."""
    on_host = by_tier(facts, layout)[1]
    passing = streamed(layout, on_host)
    shared = tuple(group in passing for group in facts.blocks)
    input_bytes = _input_bytes(facts, layout)
    forward, backward = [], []
    for group, through, waits in zip(
        facts.blocks, shared, _waiting(facts, layout, shared), strict=True
    ):
        size = group.weight_bytes if through else group.rounded_bytes * (group in on_host)
        forward.append(size / rates.up)
        size = group.weight_bytes + input_bytes * waits
        backward.append(size / rates.up_both if through else 0.0)
    count = max(1, facts.layers)
    return (
        Pass(forward_s / count, _uneven(forward), shared),
        Pass(backward_s / count, _uneven(backward[::-1]), shared[::-1]),
    )


def _waiting(facts: ModelFacts, layout: Layout, shared: Sequence[bool]) -> list[bool]:
    """Whose inputs wait on the host: of the blocks that do not keep their activations (the first
    that can do), all but the last ones."""
    keeping = kept_count(facts, layout)
    order: list[int] = []
    for at, through in enumerate(shared):
        if through or not keeping:
            order.append(at)
        else:
            keeping -= 1
    waiting = set(order[: offloading_blocks(facts, layout)])
    return [at in waiting for at in range(len(shared))]


def _uneven(copies_s: Sequence[float]) -> tuple[float, ...]:
    """The same, some of them longer and some shorter."""
    return tuple(c * UNEVEN[at % len(UNEVEN)] / _MEAN for at, c in enumerate(copies_s))


def held_up(
    facts: ModelFacts,
    layout: Layout,
    rates: Rates,
    blocks_s: tuple[float, float],
    phases: list[dict[str, float]],
) -> list[dict[str, float]]:
    """`phases` of a step (forwards, then loss and backward in turn) with copies held up as the
    layout's slots do. blocks_s: of the blocks' forward and backward."""
    slots = slot_count(facts, layout)
    if not (rates.has_gpu and slots) or _hidden(facts, layout, rates, blocks_s):
        return phases
    passes = passes_of(facts, layout, rates, *blocks_s)
    forward_s, backward_s = (pass_s(one, slots) for one in passes)
    first = len(phases) // 3
    return [
        _lasting(phase, forward_s if at < first else backward_s * ((at - first) % 2))
        for at, phase in enumerate(phases)
    ]


def _lasting(phase: dict[str, float], seconds: float) -> dict[str, float]:
    longer = seconds > phase["compute"] * (1 + 1e-9)
    return {**phase, "slots": seconds} if longer else phase


def _hidden(facts: ModelFacts, layout: Layout, rates: Rates, blocks_s: tuple[float, float]) -> bool:
    """Is even a slow copy of the largest block no longer than what one block computes?"""
    size, slower = facts.blocks.largest_weight_bytes, max(UNEVEN) / _MEAN * facts.layers
    forward_s = slower * size / rates.up
    backward_s = slower * (size + _input_bytes(facts, layout)) / rates.up_both
    return forward_s <= blocks_s[0] and backward_s <= blocks_s[1]


def _input_bytes(facts: ModelFacts, layout: Layout) -> int:
    """That come back with a streamed block in the backward pass, where they waited on the host."""
    if facts.row is None or not offloading_blocks(facts, layout):
        return 0
    return layout.batch_rows * facts.row.block_input_bytes


def slots_for(
    facts: ModelFacts, layout: Layout, rates: Rates, forward_s: float, backward_s: float
) -> int:
    """The fewest slots for a layout with which forward and backward are as short as with the most,
    or `WORTH` of both longer."""
    if _hidden(facts, layout, rates, (forward_s, backward_s)):
        return FEWEST_SLOTS
    passes = passes_of(facts, layout, rates, forward_s, backward_s)

    def both_s(slots: int) -> float:
        return sum(pass_s(one, slots) for one in passes)

    enough_s = both_s(MOST_SLOTS) + WORTH * (forward_s + backward_s)
    return next(n for n in range(FEWEST_SLOTS, MOST_SLOTS + 1) if both_s(n) <= enough_s)


def prefetch_choice(
    facts: ModelFacts,
    layout: Layout,
    rates: Rates,
    seconds: tuple[float, float],
    steps_s: tuple[float, float, float],
) -> tuple[ChoiceMade, ...]:
    """What a plan says where blocks stream and times are known. seconds: of the blocks' forward and
    backward; steps_s: of a step with one slot less, so many, and one more."""
    slots = slot_count(facts, layout)
    if not slots:
        return ()
    slot_bytes = streamed(layout, by_tier(facts, layout)[1]).largest_weight_bytes
    copy = duration_text(slot_bytes / rates.up)
    computing = " and ".join(duration_text(one_s / facts.layers) for one_s in seconds)
    beside = f"a block's copy takes {copy}, its forward and backward {computing}"
    fewer_s, step_s, more_s = steps_s
    told = duration_text(step_s)
    if layout.offload == "max":
        because = f"max streams through {slots} slots; {beside}"
    elif slots > FEWEST_SLOTS and fewer_s > step_s:
        because = f"{told} a step is predicted, and {duration_text(fewer_s)} with one less"
        because += f"; {beside}"
    else:
        gain = "no gain" if more_s >= step_s else f"{duration_text(more_s)} in place of {told}"
        because = f"{beside}; one more would take {bytes_text(slot_bytes)} for {gain}"
    return (ChoiceMade(name="placement.prefetch", value=str(max(1, slots - 1)), because=because),)


def without_times(facts: ModelFacts, layout: Layout) -> tuple[ChoiceMade, ...]:
    """The same where no times are known, or a number was asked for."""
    slots = slot_count(facts, layout)
    if not slots:
        return ()
    because = f"{slots} slots for blocks that stream, as {layout.offload} has where no times choose"
    ahead = max(1, slots - 1)
    if layout.slots is not None:
        because = "as set"
        asked = max(1, layout.slots - 1)
        if asked > ahead:
            because = f"{asked} as set, and {streamed_count(facts, layout)} blocks stream"
        elif asked < ahead:
            because = f"{asked} as set, and parts that compute with {facts.groups_at_once} blocks "
            because += f"at once need {slots} slots"
    return (ChoiceMade(name="placement.prefetch", value=str(ahead), because=because),)
