"""What three real steps showed, read from `fluxtrain dry-run --json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fluxtrain.units import bytes_text, duration_text
from fluxtui.words import counted


@dataclasses.dataclass(frozen=True)
class Compared:
    """A quantity as predicted and as measured; None is not known."""

    name: str
    predicted: str
    measured: str
    error: str  # of the prediction, "-5%": too little; "" when one is not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Predicted against measured."""

    rows: tuple[Compared, ...]
    steps: int
    total_steps: int
    eta_low_s: float
    eta_high_s: float
    over_limit: bool  # a measured peak is above what there is

    @property
    def eta(self) -> str:
        """How long the run takes at the speed of its steps."""
        low, high = duration_text(self.eta_low_s), duration_text(self.eta_high_s)
        take = "takes" if self.total_steps == 1 else "take"
        return f"{counted(self.total_steps, 'step')} {take} {low} to {high}"


def read_trial(answer: Mapping[str, Any]) -> Trial:
    """The engine's answer as a value."""
    parts = (
        ("device memory", "device_bytes", bytes_text),
        ("host memory", "host_bytes", bytes_text),
        ("a step", "seconds_per_step", duration_text),
    )
    return Trial(
        rows=tuple(_compared(name, answer[key], text) for name, key, text in parts),
        steps=answer["steps"],
        total_steps=answer["total_steps"],
        eta_low_s=answer["eta_s"]["low"],
        eta_high_s=answer["eta_s"]["high"],
        over_limit=any(_over(answer[key]) for key in ("device_bytes", "host_bytes")),
    )


def _compared(name: str, pair: Mapping[str, Any], text: Any) -> Compared:
    predicted, measured = pair["predicted"], pair["measured"]
    known = predicted is not None and measured
    error = f"{predicted / measured - 1:+.0%}" if known else ""
    return Compared(name, text(predicted), text(measured), error)


def _over(pair: Mapping[str, Any]) -> bool:
    measured, limit = pair["measured"], pair["limit"]
    return measured is not None and limit is not None and measured > limit
