"""Advice: what the last steps measured leads to a few changes, each with its gain. Pure.

The gain is a share of the step's time. With W, U and G the seconds a step waited for weights,
updates and gradients, and B those of its backward passes:

| rule      | predicted seconds a step saves                                                    |
|-----------|-----------------------------------------------------------------------------------|
| resident  | the copies that fall away, W at most (W / 2 where trained weights still go up once) |
| device    | by the cost model, W + U + G at most                                              |
| prefetch  | half of what is waited for although the copies would fit into the computing        |
| chunk     | by the cost model, whose launches are paid for each chunk                           |
| backward  | min(U, B): without clipping updates run during the backward pass                  |
| queue     | by the cost model, a token, with twice the rows a chunk: as many operations         |
| rows      | half of W, as many rows in half as many passes; or, a token, what 2 batches share  |
| data      | the time in which batches were made                                               |
| memory    | the time in which the host waited for memory (pressure stall information)           |
| redone    | the time of attempts that ran out of device memory                                 |

The cost model is believed only where it is near the step that was measured. No advice is given
without a gain, nor with one below `LEAST_GAIN`, unless it keeps steps from being done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.trace.attribution import BINDS_FROM, QUEUED_LATE
from fluxtrain.plan.rates import Rates
from fluxtrain.train.live.edit import MemoryInUse, settings_after
from fluxtrain.train.live.live_run import LiveRun, streamed
from fluxtrain.train.live.settings import LOSSES_DIFFER, Change, LiveSettings, SettingName
from fluxtrain.units import bytes_text, duration_text

MODEL_OFF = 2.0  # times the measured step, either way, up to which the cost model is believed
ROOM_SHARE = 0.9  # of the budget; the rest is for fragmentation


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Means over the last steady steps."""

    count: int
    step_s: float
    forward_s: float
    backward_s: float
    data_s: float
    stalls_s: Mapping[str, float]  # by cause: weights, update, gradients
    queued_s: float = 0.0  # a GPU computed no faster than the host queued its work

    @property
    def computing_s(self) -> float:
        """Return the seconds of forward and backward, without waiting."""
        return max(0.0, self.forward_s + self.backward_s - sum(self.stalls_s.values()))

    def stall_s(self, cause: str) -> float:
        """Return the seconds a step that the computation waited for this cause."""
        return self.stalls_s.get(cause, 0.0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run on one card: its settings and the measurements of its last steps."""

    run: LiveRun
    settings: LiveSettings
    steps: StepFacts
    memory: MemoryInUse
    rates: Rates | None  # None: not measured on this machine
    passes: int  # backward passes a step
    clips: bool  # a norm is waited for
    failed_chunk_rows: int | None = None  # ran out of device memory in this run
    redone_share: float = 0.0  # of the time of the run, in attempts that ran out of memory
    pressure_share: float | None = None  # of the last steps, in which the host waited for memory
    disproved: frozenset[Change] = field(default_factory=frozenset)


def with_change(facts: RunFacts, change: Change) -> LiveSettings | None:
    """Return the settings with a change, or None where it is impossible or leaves less of the
    budget free than automatic choices do."""
    try:
        return settings_after(facts.run, facts.settings, change, facts.memory, share=ROOM_SHARE)
    except FluxTrainError:
        return None


def free_bytes(facts: RunFacts) -> float:
    """Return the free bytes of the device's budget, less a reserve; without a GPU of the host."""
    budget = facts.run.placement.budget_of(0)
    if budget is None:
        available = facts.memory.host_available_bytes
        return float("inf") if available is None else available
    measured = facts.memory.device_peak_bytes
    peak = measured[0] if measured else facts.run.device_bytes(facts.settings, 0)
    return budget * ROOM_SHARE - peak


def has_room_for(facts: RunFacts, run: LiveRun, settings: LiveSettings) -> bool:
    """Return whether there is memory for the run with other rows in a batch."""
    now, then = facts.run.need(facts.settings), run.need(settings)
    available = facts.memory.host_available_bytes
    if available is not None and then.host_bytes - now.host_bytes > available:
        return False
    return then.device_bytes - now.device_bytes <= free_bytes(facts)


def copied_bytes(facts: RunFacts, settings: LiveSettings) -> int:
    """Return the bytes of blocks' weights that are uploaded in a step: those of a streamed block
    twice a backward pass, those of a trained resident one once."""
    once = twice = 0
    for group, row in zip(facts.run.facts.groups, settings.rows, strict=True):
        if row.kind != "block" or row.weights == "device":
            continue
        twice += 0 if row.resident else group.weight_bytes
        once += group.weight_bytes if row.resident and group.rounded_bytes else 0
    return once + 2 * facts.passes * twice


def modelled_step_s(facts: RunFacts) -> float | None:
    """Predict the present step; None where rates are unknown, or where the prediction is too far
    from the measurement to be of use."""
    if facts.rates is None:
        return None
    seconds = step_s_with(facts, facts.settings)
    return seconds if 1 / MODEL_OFF < seconds / facts.steps.step_s < MODEL_OFF else None


def step_s_with(facts: RunFacts, settings: LiveSettings) -> float:
    """Predict a step with these settings; rates must be known."""
    assert facts.rates is not None
    return facts.run.step(settings, facts.rates, clips=facts.clips, passes=facts.passes).step_s


def share_of(facts: RunFacts, seconds: float) -> str:
    """Describe `seconds` a step as a share of the last steps."""
    return f"{seconds / facts.steps.step_s:.0%} of the last {facts.steps.count} steps"


LEAST_GAIN = 0.02
MOST_ADVICE = 3
_SAME_MEMORY = ("resident", "device")
_PER_TOKEN = "The gain is per token, and a larger batch changes the training"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A live change, or a line of the configuration for the next run."""

    id: str  # the rule
    because: str  # with the measured numbers
    gain: float  # predicted, a share of the step's time
    change: Change | None = None
    setting: str = ""  # for the next run, where nothing can be changed live

    @property
    def how(self) -> str:
        """Return what to change, in words."""
        return str(self.change) if self.change is not None else self.setting


def advise(facts: RunFacts) -> tuple[Advice, ...]:
    """Return the few changes that promise the most, best first, one for the same free memory."""
    found = promising(facts)
    lesser = [advice for advice in found if advice.id in _SAME_MEMORY][1:]
    return tuple(advice for advice in found if advice not in lesser)[:MOST_ADVICE]


def promising(facts: RunFacts) -> list[Advice]:
    """Return all advice with enough gain, the best first."""
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
    """Advise more resident blocks where weights are waited for and there is room."""
    settings, waited_s = facts.settings, facts.steps.stall_s("weights")
    streams, resident = streamed(settings.rows, 0), settings.value("resident_blocks")
    if not streams or waited_s <= 0:
        return None
    found = _largest(facts, "resident_blocks", resident + streams)
    if found is None:
        return None
    change, after_it = found
    before, after = copied_bytes(facts, settings), copied_bytes(facts, after_it)
    trained = any(group.rounded_bytes for group in facts.run.facts.blocks)
    saved_s = waited_s * (before - after) / before
    if facts.rates is not None:
        saved_s = min(waited_s / (2 if trained else 1), (before - after) / facts.rates.up)
    return Advice(
        id="resident",
        because=f"{share_of(facts, waited_s)} went into waiting for copies of weights, and the "
        f"device has room to keep {change.value - resident} of {streams} streamed blocks "
        f"({bytes_text(_growth_bytes(facts, after_it))})",
        gain=saved_s / facts.steps.step_s,
        change=change,
    )


def _device(facts: RunFacts) -> Advice | None:
    """Advise groups on the device, which need neither copies nor the host's updates."""
    settings, steps = facts.settings, facts.steps
    waited_s = sum(steps.stalls_s.values())
    before = modelled_step_s(facts)
    if before is None or not facts.run.has_gpu or waited_s <= 0:
        return None
    found = _largest(facts, "device_groups", len(settings.rows))
    if found is None:
        return None
    change, after_it = found
    more = change.value - settings.value("device_groups")
    return Advice(
        id="device",
        because=f"{share_of(facts, waited_s)} went into waiting for copies and updates, and the "
        f"device has room for {more} more groups with their optimizer states "
        f"({bytes_text(_growth_bytes(facts, after_it))})",
        gain=min(1.0 - step_s_with(facts, after_it) / before, waited_s / steps.step_s),
        change=change,
    )


def _largest(facts: RunFacts, name: SettingName, most: int) -> tuple[Change, LiveSettings] | None:
    """Return the largest value of a count that fits in memory, and the settings with it; None
    where it is no larger than now."""
    for count in range(most, facts.settings.value(name), -1):
        change = Change(name=name, value=count)
        if (settings := with_change(facts, change)) is not None:
            return change, settings
    return None


def _growth_bytes(facts: RunFacts, settings: LiveSettings) -> int:
    run = facts.run
    return run.device_bytes(settings, 0) - run.device_bytes(facts.settings, 0)


def _prefetch(facts: RunFacts) -> Advice | None:
    """Advise a deeper prefetch where weights are waited for although their copies take no longer
    than the computing."""
    settings, waited_s = facts.settings, facts.steps.stall_s("weights")
    streams = streamed(settings.rows, 0)
    if facts.rates is None or streams < 2:
        return None
    change = Change(name="prefetch", value=min(2 * settings.prefetch, streams - 1))
    if change.value <= settings.prefetch or with_change(facts, change) is None:
        return None
    copying_s = copied_bytes(facts, settings) / facts.rates.up
    must_wait_s = max(0.0, copying_s - facts.steps.computing_s)
    return Advice(
        id="prefetch",
        because=f"{share_of(facts, waited_s)} went into waiting for copies of weights; they take "
        f"{duration_text(copying_s)} a step and can run while the device computes for "
        f"{duration_text(facts.steps.computing_s)}, if they start earlier",
        gain=max(0.0, waited_s - must_wait_s) / 2 / facts.steps.step_s,
        change=change,
    )


def _chunk(facts: RunFacts) -> Advice | None:
    """Advise a larger chunk, which takes fewer launches."""
    settings, batch = facts.settings, facts.run.batch_rows
    before = modelled_step_s(facts)
    if before is None or settings.chunk_rows >= batch:
        return None
    limit = batch if facts.failed_chunk_rows is None else facts.failed_chunk_rows - 1
    rows, found = settings.chunk_rows, settings
    while rows < batch:
        larger = min(2 * rows, batch)
        after_it = with_change(facts, Change(name="chunk_rows", value=larger))
        if larger > limit or after_it is None:
            break
        rows, found = larger, after_it
    if found is settings:
        return None
    chunks = -(-batch // settings.chunk_rows)
    return Advice(
        id="chunk",
        because=f"{_queued_late(facts)}{batch} rows are computed in {chunks} chunks of "
        f"{settings.chunk_rows}, and chunks of {rows} fit; losses then differ {LOSSES_DIFFER}",
        gain=1.0 - step_s_with(facts, found) / before,
        change=Change(name="chunk_rows", value=rows),
    )


def _queued_late(facts: RunFacts) -> str:
    """Begin a sentence about a GPU that waits for its work; "" where it hardly does."""
    queued_s = facts.steps.queued_s
    if queued_s < BINDS_FROM * facts.steps.step_s:
        return ""
    return f"in {share_of(facts, queued_s)} the GPU's work was {QUEUED_LATE}; "


def _queue(facts: RunFacts) -> Advice | None:
    """Advise more rows a batch where the GPU gets its work too late although whole batches are
    computed at once: as many operations then compute more rows."""
    settings, run, before = facts.settings, facts.run, modelled_step_s(facts)
    late = _queued_late(facts)
    if not late or before is None or settings.chunk_rows < run.batch_rows:
        return None
    rows, halves = 2 * run.batch_rows, facts.passes % 2 == 0
    larger = replace(
        facts,
        run=run.with_batch(rows, rows),
        settings=replace(settings, chunk_rows=rows),
        passes=facts.passes // 2 if halves else facts.passes,
    )
    if not has_room_for(facts, larger.run, larger.settings):
        return None
    after = step_s_with(larger, larger.settings)
    setting = f"train.batch_rows={rows}"
    return Advice(
        id="queue",
        because=f"{late}{rows} rows at once are as many operations, each twice as large"
        + ("" if halves else f". {_PER_TOKEN}"),
        gain=1.0 - after / (before if halves else 2 * before),
        setting=f"{setting} train.accumulation={larger.passes}" if halves else setting,
    )


def _backward(facts: RunFacts) -> Advice | None:
    """Advise turning clipping off, so that no update waits for the norm."""
    waited_s = facts.steps.stall_s("update")
    if not facts.clips or facts.passes != 1 or facts.run.facts.scales_its_loss:
        return None
    return Advice(
        id="backward",
        because=f"{share_of(facts, waited_s)} went into waiting for AdamW on the host; if "
        "gradients are not clipped, it runs during the backward pass",
        gain=min(waited_s, facts.steps.backward_s) / facts.steps.step_s,
        setting="train.max_grad_norm=null",
    )


def _rows(facts: RunFacts) -> Advice | None:
    """Advise more rows a backward pass: each copy then serves more tokens."""
    steps, run, batch = facts.steps, facts.run, 2 * facts.run.batch_rows
    weights_s, all_s = steps.stall_s("weights"), sum(steps.stalls_s.values())
    if not has_room_for(facts, run.with_batch(batch), facts.settings):
        return None
    rows = f"train.batch_rows={batch}"
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
        because=f"{share_of(facts, all_s)} went into waiting for copies and updates; a step with "
        f"twice the rows waits for them only once. {_PER_TOKEN}",
        gain=1.0 - of_two_s / 2 / steps.step_s,
        setting=rows,
    )


def _data(facts: RunFacts) -> Advice | None:
    """Advise leaving a core free where steps wait for their batches."""
    return Advice(
        id="data",
        because=f"{share_of(facts, facts.steps.data_s)} went into making batches, which takes one "
        "core",
        gain=facts.steps.data_s / facts.steps.step_s,
        setting="leave the trainer a core: end other programs, or lower OMP_NUM_THREADS",
    )


def _memory(facts: RunFacts) -> Advice | None:
    """Advise freeing memory where the host reclaims or swaps."""
    run, share = facts.run, facts.pressure_share
    if share is None:
        return None
    holds_rows = not run.has_gpu or run.placement.layout.offloads_activations
    less = run.batch_rows // 2
    setting = "close other programs, or add host memory"
    if holds_rows and less:
        freed = run.host_bytes(facts.settings) - run.with_batch(less).host_bytes(facts.settings)
        setting = (
            f"train.batch_rows={less} train.accumulation={2 * facts.passes} (frees "
            f"{bytes_text(freed)})"
        )
    return Advice(
        id="memory",
        because=f"the host was short of memory (it reclaimed or swapped) during {share:.0%} of the "
        f"last {facts.steps.count} steps",
        gain=share,
        setting=setting,
    )


def redone(failed_chunk_rows: int, chunk_rows: int, share: float) -> Advice:
    """Advise a smaller chunk for the next run: chunks of `failed_chunk_rows` ran out of device
    memory, and `share` of the run's time went into repeated steps."""
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
