"""What advice follows from: a run, its last steps, and what the cost model says of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fluxtrain.errors import FluxTrainError
from fluxtrain.live.settings import Change, LiveContext, LiveSettings, Use, settings_after
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import cost
from fluxtrain.plan.facts import Groups
from fluxtrain.plan.footprint import by_tier

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
        """Forward and backward without the waiting in them."""
        return max(0.0, self.forward_s + self.backward_s - sum(self.stalls_s.values()))

    def stall_s(self, cause: str) -> float:
        """Seconds a step that the computation waited."""
        return self.stalls_s.get(cause, 0.0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What advice follows from."""

    context: LiveContext
    settings: LiveSettings
    steps: StepFacts
    use: Use
    rates: Rates | None  # None: not measured on this machine
    passes: int  # backward passes a step
    clips: bool  # a norm is waited for
    failed_chunk_rows: int | None = None  # ran out of device memory in this run
    redone_share: float = 0.0  # of the time of the run, in attempts that ran out of memory
    pressure_share: float | None = None  # of the last steps, in which the host waited for memory
    disproved: frozenset[Change] = field(default_factory=frozenset)


def fits(facts: RunFacts, change: Change) -> bool:
    """Whether the change is possible and leaves the reserve that automatic choices leave."""
    context = facts.context
    if context.budget_bytes is not None:
        share = int(context.budget_bytes * ROOM_SHARE)
        context = replace(context, placement=replace(context.placement, budget_bytes=share))
    try:
        settings_after(context, facts.settings, change, facts.use)
    except FluxTrainError:
        return False
    return True


def free_bytes(facts: RunFacts) -> float:
    """Of the device's budget, less the reserve; without a GPU of the host."""
    context, use = facts.context, facts.use
    if context.budget_bytes is None:
        return float("inf") if use.host_available_bytes is None else use.host_available_bytes
    peak = use.device_peak_bytes
    if peak is None:
        peak = context.need(facts.settings).device_bytes
    return context.budget_bytes * ROOM_SHARE - peak


def has_room_for(facts: RunFacts, other: RunFacts) -> bool:
    """Whether what the run is would also have memory to be `other`."""
    now, then = facts.context.need(facts.settings), other.context.need(other.settings)
    available = facts.use.host_available_bytes
    if available is not None and then.host_bytes - now.host_bytes > available:
        return False
    return then.device_bytes - now.device_bytes <= free_bytes(facts)


def blocks_of(facts: RunFacts) -> Groups:
    """The blocks whose weights live on the host."""
    return by_tier(facts.context.facts, facts.context.layout_with(facts.settings))[1].blocks


def copied_bytes(facts: RunFacts, settings: LiveSettings) -> int:
    """Weights that go up in a step: streamed blocks twice a pass, resident ones once if trained."""
    blocks = blocks_of(facts)
    streamed = blocks.streamed(settings.resident_blocks)
    once = sum(b.weight_bytes for b in blocks if b.rounded_bytes and b not in streamed)
    return once + 2 * facts.passes * streamed.weight_bytes


def modelled_step_s(facts: RunFacts) -> float | None:
    """What the cost model says of the step as it is; None where that is far from what is measured,
    or rates are not known: its word about another step is then worth nothing."""
    if facts.rates is None:
        return None
    seconds = step_s_with(facts, facts.settings)
    return seconds if 1 / MODEL_OFF < seconds / facts.steps.step_s < MODEL_OFF else None


def step_s_with(facts: RunFacts, settings: LiveSettings) -> float:
    """What the cost model says of a step with these settings; rates must be known."""
    assert facts.rates is not None
    clips = facts.clips or facts.passes > 1
    context = facts.context
    layout = context.layout_with(settings)
    return cost(context.facts, layout, facts.rates, clips=clips, passes=facts.passes).step_s


def share_of(facts: RunFacts, seconds: float) -> str:
    """Say what share of the last steps these seconds a step were."""
    return f"{seconds / facts.steps.step_s:.0%} of the last {facts.steps.count} steps"
