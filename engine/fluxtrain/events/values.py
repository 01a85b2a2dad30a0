"""The numbers of events by the names under which trackers show them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fluxtrain.events.events import EvaluationFinished, Event, MemorySampled, StepFinished


def values_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return the step and the finite numbers of an event; None: it has none to show."""
    if isinstance(event, StepFinished):
        return event.step, _finite(_of_step(event))
    if isinstance(event, EvaluationFinished):
        found = {f"eval/{name}": value for name, value in event.metrics.items()}
        found |= {"eval/loss": event.loss, "eval/seconds": event.seconds}
        if event.best_loss is not None:
            found["eval/best_loss"] = event.best_loss
        return event.step, _finite(found)
    return None


def memory_of(event: MemorySampled) -> dict[str, float]:
    """Return the memory in use, in bytes."""
    return _finite(
        {
            "memory/device_used_bytes": event.device_used_bytes,
            "memory/device_peak_bytes": event.device_peak_bytes,
            "memory/host_rss_bytes": event.host_rss_bytes,
        }
    )


def _of_step(event: StepFinished) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "train/loss": event.loss,
        "train/learning_rate": event.learning_rate,
        "train/grad_norm": event.grad_norm,
        "train/epoch": event.epoch,
        "train/total_tokens": event.total_tokens,
        "train/loss_scale": event.loss_scale,
        "speed/step_s": event.step_s,
        "speed/tokens_per_s": event.tokens_per_s,
    }
    values |= {f"phases_s/{name}": seconds for name, seconds in event.phases_s.items()}
    values |= {f"stalls_s/{name}": seconds for name, seconds in event.stalls_s.items()}
    return values


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
