"""Events of a training that is changed while it runs: advice, changes, and what they were worth."""

from __future__ import annotations

from typing import Literal

import msgspec

from fluxtrain.events.event import Event, Gauge


class AdviceGiven(Event, frozen=True, kw_only=True, tag="advice"):
    """A setting that would make this run better."""

    text: str  # with the measured cause
    gain: str = ""  # predicted, with unit
    how: str = ""  # the setting to change
    id: str = ""  # its subject; newer advice with the same id replaces it
    # arguments of the `apply` command; empty: for the next run
    apply: dict[str, int] = msgspec.field(default_factory=dict)
    gain_share: float | None = None  # predicted, of the step's time


class AdviceWithdrawn(Event, frozen=True, kw_only=True, tag="advice_withdrawn"):
    """The cause of earlier advice no longer holds."""

    id: str


class ChangeApplied(Event, frozen=True, kw_only=True, tag="change"):
    """The running training was changed between two steps."""

    step: int  # the last one before the change
    name: str  # prefetch, resident_blocks, device_groups, chunk_rows
    before: int
    after: int
    why: Literal["asked", "advice", "undo", "wrong", "memory"]  # wrong: its gain was too small
    advice: str = ""  # the id, of advice
    card: int | None = None  # of several, the one that changed alone; None: all
    predicted_gain: float | None = None  # share of the step's time
    same_bits: bool = True  # losses go on bit for bit as without the change
    device_bytes: int | None = None  # predicted peak of the run, of its layouts so far
    host_bytes: int | None = None  # the same
    step_s: float | None = None  # predicted as it is now, as the next two
    tokens_per_s: float | None = None
    binds: str = ""


class ChangeRefused(Event, frozen=True, kw_only=True, tag="change_refused"):
    """A change that was asked for could not be made; nothing changed."""

    step: int
    name: str
    value: int
    because: str
    advice: str = ""


class MeasuringChange(Gauge, frozen=True, kw_only=True, tag="measuring"):
    """The progress of the measurement of the newest change."""

    name: str
    counted: int  # steady steps since the change
    wanted: int


class ChangeMeasured(Event, frozen=True, kw_only=True, tag="change_measured"):
    """The measured gain of a change: medians of steady steps before and after it.

    wrong: advice that gave less than half of the promised gain, and is undone. unknown: too few
    steady steps on one side.
    """

    step: int
    name: str
    before: int
    after: int
    verdict: Literal["kept", "wrong", "measured", "unknown"]
    measured_gain: float | None  # share of the step's time; below 0 it cost
    predicted_gain: float | None = None
    advice: str = ""
    before_s: float | None = None  # median step
    after_s: float | None = None
    steps_before: int = 0
    steps_after: int = 0
