"""What three real steps showed, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fluxtrain.client.dry_run import DryRunAnswer
from fluxtrain.units import bytes_text, duration_text
from fluxtui.words import counted


@dataclasses.dataclass(frozen=True)
class TrialRow:
    """A quantity as predicted and as measured, in words."""

    name: str
    predicted: str
    measured: str
    error: str  # of the prediction, "-5%": too little; "" when one is not known


def trial_rows(trial: DryRunAnswer) -> tuple[TrialRow, ...]:
    """Predicted beside measured: memory and a step."""
    device, host, step = trial.device_bytes, trial.host_bytes, trial.step_s
    return (
        _row("device memory", device.predicted, device.measured, bytes_text),
        _row("host memory", host.predicted, host.measured, bytes_text),
        _row("a step", step.predicted, step.measured, duration_text),
    )


def eta_text(trial: DryRunAnswer) -> str:
    """How long the run takes at the speed of its steps."""
    low, high = duration_text(trial.eta_s.low), duration_text(trial.eta_s.high)
    take = "takes" if trial.total_steps == 1 else "take"
    return f"{counted(trial.total_steps, 'step')} {take} {low} to {high}"


def _row(
    name: str, predicted: float | None, measured: float | None, text: Callable[[Any], str]
) -> TrialRow:
    error = "" if predicted is None or not measured else f"{predicted / measured - 1:+.0%}"
    return TrialRow(name, text(predicted), text(measured), error)
