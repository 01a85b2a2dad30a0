"""The answer of `fluxtrain dry-run --json`: three real steps beside what the plan predicted."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fluxtrain.client.answer import Answer


class PeakBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A memory's peak; None is not known."""

    predicted: int | None
    measured: int | None
    limit: int | None

    @property
    def is_over_limit(self) -> bool:
        """Whether more was taken than there is, as far as both are known."""
        return self.measured is not None and self.limit is not None and self.measured > self.limit


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes: the plan's word, and the median of the steps after the first."""

    predicted: float | None
    measured: float


class RunSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """How long the whole run takes: the plan's word, and by the fastest and the slowest step."""

    predicted: float | None
    low: float
    high: float


class DryRunAnswer(Answer, frozen=True, kw_only=True):
    """What a dry run measured, beside the plan of the run itself."""

    COMMAND: ClassVar[str] = "dry-run"

    steps: int
    total_steps: int  # of the run
    loading_s: float | None  # from the first event to the first step
    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    step_s: StepSeconds
    eta_s: RunSeconds
    device_bytes: PeakBytes
    host_bytes: PeakBytes
    seconds: float  # of the dry run itself

    @property
    def is_over_limit(self) -> bool:
        """Whether a measured peak is above what there is."""
        return self.device_bytes.is_over_limit or self.host_bytes.is_over_limit
