"""Facts that advice follows from: a run, its last steps, and the planner's predictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluxtrain.errors import FluxTrainError
from fluxtrain.plan.rates import Rates
from fluxtrain.train.live.edit import MemoryInUse, settings_after
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import Change, LiveSettings

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
        """Return the seconds a step that the computation waited for this cause."""
        return self.stalls_s.get(cause, 0.0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run on one card, its settings and what was measured of its last steps."""

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
    """Return what is free of the device's budget, less a reserve; without a GPU of the host."""
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
    """Predict the step as it is; None where that is far from what was measured, so that a
    prediction of another step is worth nothing, or where rates are not known."""
    if facts.rates is None:
        return None
    seconds = step_s_with(facts, facts.settings)
    return seconds if 1 / MODEL_OFF < seconds / facts.steps.step_s < MODEL_OFF else None


def step_s_with(facts: RunFacts, settings: LiveSettings) -> float:
    """Predict a step with these settings; rates must be known."""
    assert facts.rates is not None
    return facts.run.step(settings, facts.rates, clips=facts.clips, passes=facts.passes).step_s


def share_of(facts: RunFacts, seconds: float) -> str:
    """Word the share of the last steps that these seconds a step were."""
    return f"{seconds / facts.steps.step_s:.0%} of the last {facts.steps.count} steps"
