"""The answers of `fluxtrain dry-run --json`, three real steps beside what the plan predicted, and
of `fluxtrain verify-resume --json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from fluxtrain.events.answers.answer import Answer
from fluxtrain.units import bytes_text, duration_text


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
    """Tells what a dry run measured, beside the plan of the run itself."""

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

    def rows(self) -> tuple[ComparedRow, ...]:
        """Predicted beside measured in words: the memories and a step."""
        device, host, step = self.device_bytes, self.host_bytes, self.step_s
        return (
            _row("device memory", device.predicted, device.measured, bytes_text),
            _row("host memory", host.predicted, host.measured, bytes_text),
            _row("a step", step.predicted, step.measured, duration_text),
        )

    def eta_text(self) -> str:
        """How long the run takes at the speed of its steps."""
        low, high = duration_text(self.eta_s.low), duration_text(self.eta_s.high)
        steps = "1 step takes" if self.total_steps == 1 else f"{self.total_steps:,} steps take"
        return f"{steps} {low} to {high}"


class ComparedRow(msgspec.Struct, frozen=True):
    """A quantity as predicted and as measured, in words."""

    name: str
    predicted: str
    measured: str
    error: str  # of the prediction, "-5%": too little; "" when one is not known


def _row(
    name: str, predicted: float | None, measured: float | None, text: Callable[[Any], str]
) -> ComparedRow:
    error = "" if predicted is None or not measured else f"{predicted / measured - 1:+.0%}"
    return ComparedRow(name, text(predicted), text(measured), error)


class ResumeAnswer(Answer, frozen=True, kw_only=True):
    """A run of `steps` steps beside one that was resumed after `saved_step` in a new process."""

    COMMAND: ClassVar[str] = "verify-resume"

    steps: int
    saved_step: int
    tensors: int  # of weights, masters and moments that were compared
    values: int  # in them
    first_step: int | None = None  # whose loss, norm or rate differs
    first_tensor: str | None = None  # that differs after the last step
    difference: str | None = None  # in words
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Return whether the two were the same, bit for bit."""
        return self.difference is None
