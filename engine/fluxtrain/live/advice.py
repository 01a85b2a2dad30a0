"""Advice: from what the last steps measured to a few changes, each with its gain. Pure.

The gain is a share of the step's time. With W, U and G the seconds a step waited for weights,
updates and gradients, and B those of its backward passes:

| rule      | predicted seconds a step saves                                                    |
|-----------|-----------------------------------------------------------------------------------|
| resident  | the copies that fall away, W at most (W / 2 where trained weights still go up once) |
| device    | by the cost model, W + U + G at most                                              |
| prefetch  | half of what is waited for although the copies would fit beside the computing      |
| chunk     | by the cost model, whose launches are paid for each chunk                           |
| backward  | min(U, B): without clipping updates run beside the backward pass                  |
| queue     | by the cost model, a token, with twice the rows a chunk: as many operations         |
| rows      | half of W, as many rows in half as many passes; or, a token, what 2 batches share  |
| data      | the time in which batches were made                                               |
| memory    | the time in which the host waited for memory (pressure stall information)           |
| redone    | the time of attempts that ran out of device memory                                 |

The cost model is only believed where it is near the step that was measured. Nothing is said without
such a number, and nothing below `LEAST_GAIN` but what keeps a step from being done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fluxtrain.live.run_facts import (
    RunFacts,
    blocks_of,
    copied_bytes,
    fits,
    has_room_for,
    modelled_step_s,
    share_of,
    step_s_with,
)
from fluxtrain.live.settings import BY_ANOTHER_CHUNK, Change
from fluxtrain.trace.attribution import BINDS_FROM, QUEUED_LATE
from fluxtrain.units import bytes_text, duration_text

LEAST_GAIN = 0.02
MOST_ADVICE = 3
_SAME_MEMORY = ("resident", "device")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One piece: a live change, or a line of the configuration for the next run."""

    id: str  # the rule
    because: str  # with the measured numbers
    gain: float  # predicted, a share of the step's time
    change: Change | None = None
    setting: str = ""  # for the next run, where nothing can be changed live

    @property
    def how(self) -> str:
        """What to change, in words."""
        return str(self.change) if self.change is not None else self.setting


def advise(facts: RunFacts) -> tuple[Advice, ...]:
    """The few changes that promise the most, the best first; one for the same spare memory."""
    found = promising(facts)
    lesser = [advice for advice in found if advice.id in _SAME_MEMORY][1:]
    return tuple(advice for advice in found if advice not in lesser)[:MOST_ADVICE]


def promising(facts: RunFacts) -> list[Advice]:
    """All that is worth saying, the best first."""
    found = [advice for rule in _RULES if (advice := rule(facts)) is not None]
    worth = [
        advice
        for advice in found
        if (advice.gain >= LEAST_GAIN or advice.id == "redone")
        and advice.change not in facts.disproved
    ]
    best = sorted(worth, key=lambda advice: -advice.gain)
    first = {(advice.change, advice.setting): advice for advice in reversed(best)}
    return [advice for advice in best if first[advice.change, advice.setting] is advice]


def _resident(facts: RunFacts) -> Advice | None:
    """Weights are waited for and there is room: fewer of them need to be copied."""
    context, settings, waited_s = facts.context, facts.settings, facts.steps.stall_s("weights")
    streamed = context.streamed(settings)
    if not streamed or waited_s <= 0:
        return None
    for count in range(context.host_blocks(settings), settings.resident_blocks, -1):
        change = Change(name="resident_blocks", value=count)
        if fits(facts, change):
            break
    else:
        return None
    more = count - settings.resident_blocks
    before, after = (
        copied_bytes(facts, settings),
        copied_bytes(facts, change.applied_to(settings)),
    )
    trained = blocks_of(facts).rounded_bytes > 0
    saved_s = waited_s * (before - after) / before
    if facts.rates is not None:
        saved_s = min(waited_s / (2 if trained else 1), (before - after) / facts.rates.up)
    growth = context.device_growth_bytes(settings, change.applied_to(settings))
    return Advice(
        id="resident",
        because=f"{share_of(facts, waited_s)} went into waiting for copies of weights, and "
        f"{bytes_text(growth)} for {more} of {streamed} streamed blocks is free",
        gain=saved_s / facts.steps.step_s,
        change=change,
    )


def _device(facts: RunFacts) -> Advice | None:
    """Copies and updates are waited for and there is room: parts that need neither."""
    context, settings, steps = facts.context, facts.settings, facts.steps
    waited_s = sum(steps.stalls_s.values())
    before = modelled_step_s(facts)
    if before is None or not context.has_gpu or waited_s <= 0:
        return None
    for count in range(len(context.facts.groups), settings.device_groups, -1):
        change = Change(name="device_groups", value=count)
        if fits(facts, change):
            break
    else:
        return None
    after = step_s_with(facts, change.applied_to(settings))
    growth = context.device_growth_bytes(settings, change.applied_to(settings))
    return Advice(
        id="device",
        because=f"{share_of(facts, waited_s)} went into waiting for copies and updates, and "
        f"{bytes_text(growth)} for {count - settings.device_groups} more parts with their "
        "optimizer states is free on the device",
        gain=min(1.0 - after / before, waited_s / steps.step_s),
        change=change,
    )


def _prefetch(facts: RunFacts) -> Advice | None:
    """Copies would fit beside the computing and are waited for all the same: start them sooner."""
    settings, waited_s = facts.settings, facts.steps.stall_s("weights")
    streamed = facts.context.streamed(settings)
    if facts.rates is None or streamed < 2:
        return None
    change = Change(name="prefetch", value=min(2 * settings.prefetch, streamed - 1))
    if change.value <= settings.prefetch or not fits(facts, change):
        return None
    copying_s = copied_bytes(facts, settings) / facts.rates.up
    must_wait_s = max(0.0, copying_s - facts.steps.computing_s)
    return Advice(
        id="prefetch",
        because=f"{share_of(facts, waited_s)} went into waiting for copies of weights, which take "
        f"{duration_text(copying_s)} beside {duration_text(facts.steps.computing_s)} of computing",
        gain=max(0.0, waited_s - must_wait_s) / 2 / facts.steps.step_s,
        change=change,
    )


def _chunk(facts: RunFacts) -> Advice | None:
    """A larger chunk fits: fewer launches."""
    settings, batch = facts.settings, facts.context.layout.batch_rows
    before = modelled_step_s(facts)
    if before is None or settings.chunk_rows >= batch:
        return None
    limit = batch if facts.failed_chunk_rows is None else facts.failed_chunk_rows - 1
    rows = settings.chunk_rows
    while rows < batch:
        larger = min(2 * rows, batch)
        if larger > limit or not fits(facts, Change(name="chunk_rows", value=larger)):
            break
        rows = larger
    if rows == settings.chunk_rows:
        return None
    change = Change(name="chunk_rows", value=rows)
    after = step_s_with(facts, change.applied_to(settings))
    chunks = -(-batch // settings.chunk_rows)
    return Advice(
        id="chunk",
        because=f"{_queued_late(facts)}{batch} rows are computed in {chunks} chunks of "
        f"{settings.chunk_rows}, and chunks of {rows} fit; losses then differ {BY_ANOTHER_CHUNK}",
        gain=1.0 - after / before,
        change=change,
    )


def _queued_late(facts: RunFacts) -> str:
    """Name the GPU that waits for its work, as the beginning of a sentence; "" where it hardly
    does."""
    queued_s = facts.steps.queued_s
    if queued_s < BINDS_FROM * facts.steps.step_s:
        return ""
    return f"in {share_of(facts, queued_s)} the GPU's work was {QUEUED_LATE}; "


def _queue(facts: RunFacts) -> Advice | None:
    """The GPU gets its work too late, in whole batches: larger operations, not more of them."""
    settings, layout, before = facts.settings, facts.context.layout, modelled_step_s(facts)
    late = _queued_late(facts)
    if not late or before is None or settings.chunk_rows < layout.batch_rows:
        return None
    rows, halves = 2 * layout.batch_rows, facts.passes % 2 == 0
    larger = replace(
        facts,
        context=facts.context.planned_as(replace(layout, batch_rows=rows, chunk_rows=rows)),
        settings=replace(settings, chunk_rows=rows),
        passes=facts.passes // 2 if halves else facts.passes,
    )
    if not has_room_for(facts, larger):
        return None
    after = step_s_with(larger, larger.settings)
    setting = f"train.batch_rows={rows}"
    return Advice(
        id="queue",
        because=f"{late}{rows} rows at once are as many operations, each twice as large"
        + ("" if halves else " (gain for each token; a larger batch is another training)"),
        gain=1.0 - after / (before if halves else 2 * before),
        setting=f"{setting} train.accumulation={larger.passes}" if halves else setting,
    )


def _backward(facts: RunFacts) -> Advice | None:
    """Without clipping nothing waits for the norm."""
    waited_s = facts.steps.stall_s("update")
    if not facts.clips or facts.passes != 1 or facts.context.facts.scales_its_loss:
        return None
    return Advice(
        id="backward",
        because=f"{share_of(facts, waited_s)} went into waiting for AdamW on the host; without "
        "clipping it runs beside the backward pass (gradients are then not clipped)",
        gain=min(waited_s, facts.steps.backward_s) / facts.steps.step_s,
        setting="train.max_grad_norm=null",
    )


def _rows(facts: RunFacts) -> Advice | None:
    """More rows a pass: each copy serves more tokens."""
    steps, layout = facts.steps, facts.context.layout
    weights_s, all_s = steps.stall_s("weights"), sum(steps.stalls_s.values())
    larger = facts.context.planned_as(replace(layout, batch_rows=2 * layout.batch_rows))
    if not has_room_for(facts, replace(facts, context=larger)):
        return None
    rows = f"train.batch_rows={2 * layout.batch_rows}"
    if facts.passes % 2 == 0:
        return Advice(
            id="rows",
            because=f"{share_of(facts, weights_s)} went into waiting for copies of weights in "
            f"{facts.passes} passes a step; the same rows fit in half as many",
            gain=weights_s / 2 / steps.step_s,
            setting=f"{rows} train.accumulation={facts.passes // 2}",
        )
    computing_s = steps.step_s - all_s
    of_two_s = 2 * computing_s + max(0.0, all_s - computing_s)
    return Advice(
        id="rows",
        because=f"{share_of(facts, all_s)} went into waiting for copies and updates, which a step "
        "with twice the rows pays once (gain for each token; a larger batch is another training)",
        gain=1.0 - of_two_s / 2 / steps.step_s,
        setting=rows,
    )


def _data(facts: RunFacts) -> Advice | None:
    """Batches are made between the steps, on the processor."""
    return Advice(
        id="data",
        because=f"{share_of(facts, facts.steps.data_s)} went into making batches, on one core",
        gain=facts.steps.data_s / facts.steps.step_s,
        setting="leave a core to the trainer: other programs, or OMP_NUM_THREADS, take them all",
    )


def _memory(facts: RunFacts) -> Advice | None:
    """The host reclaims or swaps."""
    layout, share = facts.context.layout, facts.pressure_share
    if share is None:
        return None
    holds_rows = not facts.context.has_gpu or layout.offloads_activations
    less = layout.batch_rows // 2
    setting = "close other programs, or add host memory"
    if holds_rows and less:
        smaller = facts.context.planned_as(replace(layout, batch_rows=less))
        freed = (
            facts.context.need(facts.settings).host_bytes - smaller.need(facts.settings).host_bytes
        )
        setting = (
            f"train.batch_rows={less} train.accumulation={2 * facts.passes} (frees "
            f"{bytes_text(freed)})"
        )
    return Advice(
        id="memory",
        because=f"the host waited for memory (reclaiming, swapping) during {share:.0%} of the last "
        f"{facts.steps.count} steps",
        gain=share,
        setting=setting,
    )


def redone(failed_chunk_rows: int, chunk_rows: int, share: float) -> Advice:
    """Attempts with chunks of `failed_chunk_rows` ran out of device memory and were done again,
    which took `share` of the run's time so far."""
    return Advice(
        id="redone",
        because=f"device memory ran out with chunks of {failed_chunk_rows} rows, and {share:.1%} "
        "of this run's time went into steps that were done again",
        gain=share,
        setting=f"placement.chunk_rows={chunk_rows}",
    )


def _redone(facts: RunFacts) -> Advice | None:
    if facts.failed_chunk_rows is None:
        return None
    return redone(facts.failed_chunk_rows, facts.settings.chunk_rows, facts.redone_share)


_RULES: tuple[Callable[[RunFacts], Advice | None], ...] = (
    _resident, _device, _prefetch, _chunk, _queue, _backward, _rows, _data, _memory, _redone,
)  # fmt: skip
