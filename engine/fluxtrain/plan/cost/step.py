"""How long a step of a layout takes, from measured rates. Pure arithmetic.

    clipping      max(forward, uploads, host update) + loss + backward
    deferred      max(forward, uploads, weights' pass) + loss + backward behind the moments' pass
    in backward   max(forward, uploads) after the last update + loss + backward behind the updates

Each phase takes as long as the slowest of what runs at once in it, and no shorter than the host
needs to queue it (`plan/cost/queueing.py`).

- The forward cannot end before the last block's update, so no update overlaps with the loss.
- Deferred moments: each pass moves 18 of 26 bytes a parameter. A group's new gradients are
  downloaded when its moments are done, so backward waits for the moments of later groups.
- Step in backward: an update begins when its gradients are on the host and the update before it
  has ended (`plan/cost/updates.py`); three may wait. The embedding is updated last and needed
  first.
- Groups on the device cost no bus and no host update. Resident weights are uploaded once a step,
  streamed ones for the forward and again for the backward, beside the gradients' downloads.
- Few slots begin copies late (`plan/cost/prefetch.py`).
- Where a block of this model was timed here (`plan/cost/calibration.py`), its seconds take the
  place of the matmul rate and of the class's constants.
- Without a GPU the same cores do everything, so nothing overlaps.

Not counted: what the optimizer and the copies take from each other of host memory's bandwidth. Of
a mixture of experts every expert computes for every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from fluxtrain.plan.cost.accumulation import passes_again
from fluxtrain.plan.cost.binding import binding_of, binding_words
from fluxtrain.plan.cost.calibration import chunked
from fluxtrain.plan.cost.prefetch import held_up
from fluxtrain.plan.cost.queueing import Queueing, queueing_of
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.updates import (
    BF16_UPDATE_BYTES,
    computing,
    forward_after_backward_updates,
    forward_after_updates,
    host_updates,
    moments_end,
    start_of,
    waits_in_backward,
    work_in_backward,
)
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    chunked_head,
    kept_count,
    offloading_blocks,
    rows_of_table,
    streamed,
)

FORWARD_PASSES = 2  # operations a weight and token
BACKWARD_PASSES = 6  # recomputed forward, gradients of inputs and of weights
FROZEN_BACKWARD_PASSES = 4  # no gradients of weights


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step by what takes them; phases overlap as `step_s` says."""

    forward_s: float  # of the blocks
    head_s: float  # with its gradient
    backward_s: float
    upload_forward_s: float
    upload_backward_s: float
    download_s: float
    host_update_s: float  # where moments are deferred, of the weights alone
    deferred_moments_s: float = 0.0  # on the host, beside the first backward pass
    device_update_s: float = 0.0  # of groups that live on the device, where it was measured
    beside_bytes_s: float = 0.0  # of groups on the host on the cores that compute, where measured
    queueing_s: float = 0.0  # by the host, of all blocks, where it was measured
    forward_phase_s: float = 0.0  # with a GPU: all forwards with what they wait for,
    backward_phase_s: float = 0.0  # all backwards with theirs
    step_s: float
    tokens: int  # of one step
    binds: str  # the resource that takes the most of the step, in words

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.step_s

    @property
    def carried_s(self) -> float:
        """What host memory and bus do for the step, hidden or not."""
        copies_s = self.upload_forward_s + self.upload_backward_s + self.download_s
        return self.host_update_s + self.deferred_moments_s + copies_s


Phases = list[dict[str, float]]  # in order; seconds by what takes them


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a step has to do, each part by itself: `phases` in which no update holds anything up."""

    rates: Rates  # with AdamW as fast as it is in such a step
    forward_s: float
    head_s: float
    backward_s: float
    device_update_s: float
    update_s: float
    moments_s: float
    beside_s: float
    queueing: Queueing
    uploads: tuple[float, float, float]  # forward, backward, at the loss
    downloads: tuple[float, float]
    phases: Phases


def cost(
    facts: ModelFacts, layout: Layout, rates: Rates, *, clips: bool = True, passes: int = 1
) -> Cost:
    """Seconds of one optimizer step of `passes` batches. `exact`: updates wait for the norm."""
    work = _work_of(facts, layout, rates, clips=clips, passes=passes)
    rates, blocks_s = work.rates, (work.forward_s, work.backward_s)
    phases = held_up(facts, layout, rates, blocks_s, work.phases)
    updates_s = work.update_s + work.moments_s
    lasting_s: list[float] = []  # of each phase
    if not rates.has_gpu:
        seconds = _one_after_the_other(work, updates_s)
        more = [{"update": work.update_s}, {"moments": work.moments_s}]
        binding = binding_of([*phases, *more], together=False)
    else:
        beside = _exact_phases if clips else _phases_in_backward
        phases, deciding = beside(facts, layout, work, phases, passes)
        lasting_s = [max(phase.values()) for phase in phases]
        seconds = sum(lasting_s)
        binding = binding_of(deciding, together=True)
    seconds += _end_of_step(work, phases[-1]) if rates.has_gpu else work.device_update_s
    queueing_s = work.queueing.step(passes)
    for what, least_s in (("update", updates_s), ("queueing", queueing_s)):
        if _if_longer(least_s, seconds):
            seconds, binding = least_s, what
    row = facts.row
    assert row is not None
    return Cost(
        forward_s=passes * work.forward_s,
        head_s=passes * work.head_s,
        backward_s=passes * work.backward_s,
        upload_forward_s=passes * (work.uploads[0] + work.uploads[2]),
        upload_backward_s=passes * work.uploads[1],
        download_s=passes * sum(work.downloads),
        host_update_s=work.update_s,
        deferred_moments_s=work.moments_s,
        device_update_s=work.device_update_s,
        beside_bytes_s=work.beside_s,
        queueing_s=queueing_s,
        forward_phase_s=sum(lasting_s[:passes]),
        backward_phase_s=sum(lasting_s[passes + 1 :: 2]),
        step_s=seconds,
        tokens=passes * layout.batch_rows * row.sequence_length,
        binds=binding_words(binding, has_gpu=rates.has_gpu),
    )


@dataclass(frozen=True)
class LeastCost:
    """Seconds that those of a `Cost` by the same names do not go below."""

    step_s: float
    carried_s: float


def least_cost(
    facts: ModelFacts,
    layout: Layout,
    rates: Rates,
    *,
    clips: bool = True,
    passes: int = 1,
    moments_free: bool = False,
) -> LeastCost:
    """What `cost` says at least, known without going through the groups one by one: what waits for
    updates waits as little as it can. `moments_free`: whether they are deferred or not, whatever
    `layout` says of it."""
    work = _work_of(facts, layout, rates, clips=clips, passes=passes)
    updates = {layout: (work.update_s, work.moments_s)}
    if moments_free:
        otherwise = replace(layout, deferred_moments=not layout.deferred_moments)
        updates[otherwise] = host_updates(facts, otherwise, work.rates)
    updates_s = min(sum(both) for both in updates.values())
    if not work.rates.has_gpu:
        seconds = _one_after_the_other(work, updates_s)
    else:
        lasting_s = [max(phase.values()) for phase in work.phases]
        seconds = sum(lasting_s)
        if clips:
            awaited_s = min(update_s for update_s, _ in updates.values())
            seconds += max(0.0, awaited_s - lasting_s[0])
    seconds += work.device_update_s
    copies_s = passes * (sum(work.uploads) + sum(work.downloads))
    return LeastCost(max(seconds, updates_s, work.queueing.step(passes)), updates_s + copies_s)


def _work_of(facts: ModelFacts, layout: Layout, rates: Rates, *, clips: bool, passes: int) -> _Work:
    forward_s, head_s, backward_s = passes_s(facts, layout, rates)
    chunked = chunked_head(facts, layout, by_tier(facts, layout)[1])
    head_s *= 1.0 if chunked is None else chunked.compute_share
    uploaded_twice = 0 if chunked is None else chunked.copied_bytes
    device_update_s = _device_update(facts, layout, rates)
    queueing = queueing_of(facts, layout, rates, head_s, clips=clips)
    if rates.has_gpu and by_tier(facts, layout)[1].trained:
        forward_s = max(forward_s, facts.layers * queueing.forward_s)
    if rates.has_gpu and not clips:
        rates = rates.beside_backward()
    update_s, moments_s = host_updates(facts, layout, rates)
    once, twice, downloaded = _traffic(facts, layout)
    carried = _offloaded_bytes(facts, layout)
    uploads = (
        (once + twice) / rates.up,
        (twice + carried) / rates.up_both,
        uploaded_twice / rates.up,
    )
    downloads = carried / rates.down, downloaded / rates.down_both
    left_s = max(0.0, downloads[0] - head_s)
    forward = {"compute": forward_s, "uploads": uploads[0], "downloads": left_s}
    backward = {"compute": backward_s, "uploads": uploads[1], "downloads": downloads[1]}
    backward["queueing"] = queueing.backward(0.0)
    loss = {"compute": head_s, "uploads": uploads[2]}
    return _Work(
        rates=rates,
        forward_s=forward_s,
        head_s=head_s,
        backward_s=backward_s,
        device_update_s=device_update_s,
        update_s=update_s,
        moments_s=moments_s,
        beside_s=_beside_bytes(facts, layout, rates),
        queueing=queueing,
        uploads=uploads,
        downloads=downloads,
        phases=[dict(forward) for _ in range(passes)]
        + [loss, backward]
        + list(chain.from_iterable(passes_again(facts, layout, rates, loss, backward, passes))),
    )


def _one_after_the_other(work: _Work, updates_s: float) -> float:
    """Seconds where nothing overlaps, for the same cores do all of it."""
    return sum(sum(phase.values()) for phase in work.phases) + updates_s + work.beside_s


def _exact_phases(
    facts: ModelFacts, layout: Layout, work: _Work, phases: Phases, passes: int
) -> tuple[Phases, Phases]:
    """`phases` of the computation and its copies with the updates before the first forward and the
    moments beside the first backward; and those that say what binds the step."""
    rates, queueing, update_s = work.rates, work.queueing, work.update_s
    forward, backward = phases[0], phases[passes + 1]
    block_s = forward["compute"] / max(1, facts.layers)
    if by_tier(facts, layout)[1].trained:
        forward = {**forward, "compute": queueing.forward(block_s, update_s)}
    start = start_of(facts, layout, rates)
    begins_s = forward["compute"] + start.update_s + start.copy_s
    after_s = forward_after_updates(facts, layout, rates, forward["compute"], update_s)
    least_s = {**forward, "compute": begins_s}
    first = {name: max(after_s.get(name, 0.0), seconds) for name, seconds in least_s.items()}
    found = [{**first, "update": after_s["update"]}, *phases[1:]]
    before_s = sum(max(phase.values()) for phase in found[: passes + 1])
    late_s = max(0.0, update_s + work.moments_s - before_s)  # of the moments
    backward = {**backward, "queueing": queueing.backward(late_s if work.moments_s else 0.0)}
    computing_s = computing(backward)
    end_s = moments_end(facts, layout, rates, computing_s, update_s - before_s)
    found[passes + 1] = {**backward, "moments": _if_longer(end_s, computing_s)}
    return found, found


def _phases_in_backward(
    facts: ModelFacts, layout: Layout, work: _Work, phases: Phases, passes: int
) -> tuple[Phases, Phases]:
    """The same with the updates beside the last backward."""
    rates, forward = work.rates, phases[0]
    backward = {**phases[-1], "queueing": work.queueing.backward(float("inf"))}
    waits = waits_in_backward(facts, layout, rates, backward)
    held_up_s = _if_longer(waits.backward_s, max(backward.values()))
    begins = forward_after_backward_updates(facts, layout, rates, forward, waits)
    work_s = work_in_backward(facts, layout, rates, forward["compute"])
    found = [begins, *phases[1:-1], {**backward, "update": held_up_s}]
    return found, [forward, *phases[1:-1], {**backward, "update": max(work_s, held_up_s)}]


def _end_of_step(work: _Work, backward: dict[str, float]) -> float:
    """Seconds from the end of the last backward pass to that of the step: updates on the device,
    or, where it is later, what the host has then still to do."""
    host_s = max(backward["queueing"], backward.get("moments", 0.0)) + work.queueing.optimizer_s
    return max(work.device_update_s, host_s - max(backward.values()))


def _if_longer(seconds: float, than_s: float) -> float:
    """`seconds`, or none where they are no longer: then they are hidden."""
    return seconds if seconds > than_s * (1 + 1e-9) else 0.0


def passes_s(facts: ModelFacts, layout: Layout, rates: Rates) -> tuple[float, float, float]:
    """Seconds of the blocks' forward, of what stands outside them, and of the backward pass."""
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


def _device_update(facts: ModelFacts, layout: Layout, rates: Rates) -> float:
    """Seconds of AdamW on the groups that live on the device."""
    if rates.calibration is None:
        return 0.0
    return by_tier(facts, layout)[0].trained * rates.calibration.device_update_s


def _beside_bytes(facts: ModelFacts, layout: Layout, rates: Rates) -> float:
    """Seconds of the groups on the host beside the bytes that are updated and copied, once a
    step."""
    streamed = None if rates.calibration is None else rates.calibration.streamed
    if rates.has_gpu or streamed is None:
        return 0.0
    update_bytes_per_s = BF16_UPDATE_BYTES * rates.adamw_per_s
    one_s = streamed.beside_bytes_s(update_bytes_per_s, rates.copy_bytes_per_s)
    return len(by_tier(facts, layout)[1]) * one_s


def _traffic(facts: ModelFacts, layout: Layout) -> tuple[int, int, int]:
    """Bytes of updated weights that go up once a step, of weights that go up once a phase, and of
    downloaded gradients."""
    on_host = by_tier(facts, layout)[1]
    passing = streamed(layout, on_host)
    trained = on_host.rounded_bytes
    kept = trained - passing.rounded_bytes
    by_rows = rows_of_table(facts, layout, on_host)
    if by_rows is not None:
        whole_bytes = 0 if by_rows.tied else by_rows.table.rounded_bytes
        kept += by_rows.weight_bytes - whole_bytes
        trained += by_rows.gradient_bytes - whole_bytes
    chunked = chunked_head(facts, layout, on_host)
    kept -= 0 if chunked is None else chunked.group.rounded_bytes
    return kept, passing.weight_bytes, trained


def _offloaded_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Boundary activations that go to the host and come back."""
    row = facts.row
    return (
        0
        if row is None
        else offloading_blocks(facts, layout) * layout.batch_rows * row.block_input_bytes
    )
