"""What a plan said against what the run then took. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fluxtrain.events.events import Compared

WARMING_STEPS = 3  # the first steps allocate, compile and compare recomputed blocks

# What is compared, in the order that people read it.
QUANTITIES = ("device_peak_bytes", "host_peak_bytes", "step_s")


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The predicted memory and time of a layout; None where no rates are known."""

    device_bytes: int  # peak
    host_bytes: int  # peak of the whole process
    step_s: float | None = None
    tokens_per_s: float | None = None
    binds: str = ""

    def after(self, earlier: Promise) -> Promise:
        """Return the prediction of a run that had another layout before: its peaks are the larger
        ones."""
        return replace(
            self,
            device_bytes=max(self.device_bytes, earlier.device_bytes),
            host_bytes=max(self.host_bytes, earlier.host_bytes),
        )


def steady_step_s(steps_s: Sequence[float]) -> float | None:
    """Return the median of the steps after the first few; None where there are none."""
    steady = steps_s[WARMING_STEPS:]
    return median(steady) if steady else None


def compared(
    predicted: Mapping[str, float | None], measured: Mapping[str, float | None]
) -> tuple[Compared, ...]:
    """Return one row for each quantity, with the prediction's error as a share of the measurement;
    None where either is unknown."""
    return tuple(_row(name, predicted.get(name), measured.get(name)) for name in QUANTITIES)


def _row(name: str, predicted: float | None, measured: float | None) -> Compared:
    error = None
    if predicted is not None and measured:
        error = predicted / measured - 1
    return Compared(quantity=name, predicted=predicted, measured=measured, error=error)
