"""Settings left on `auto`, resolved to numbers, each with its reason. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fluxtrain.config.schema import TrainSettings
from fluxtrain.events.events import ChoiceMade

WARMUP_SHARE = 0.03
WARMUP_LIMIT_STEPS = 100
FEW_STEPS = 10  # of a whole run, which teach next to nothing
_ENOUGH_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast a run trains: its steps and learning rates, resolved."""

    total_steps: int
    warmup_steps: int
    learning_rate: float
    choices: tuple[ChoiceMade, ...]
    told: tuple[str, ...] = ()  # what a person should know before training, a sentence each


def choose_schedule(
    settings: TrainSettings,
    *,
    steps_per_epoch: int,
    usual_rate: tuple[float, str],
    estimated: bool = False,
) -> Schedule:
    """Resolve steps, warm-up and learning rate; `usual_rate` is taken for auto, with its reason.

    `estimated`: not all of the data was counted for `steps_per_epoch`.
    """
    total, total_because = _steps(settings, steps_per_epoch, "about " * estimated)
    choices = [ChoiceMade(name="train.steps", value=str(total), because=total_because)]
    rate = settings.learning_rate
    if rate == "auto":
        rate, why = usual_rate
        choices.append(ChoiceMade(name="train.learning_rate", value=f"{rate:g}", because=why))
    if settings.warmup_steps == "auto":
        warmup = math.ceil(min(WARMUP_LIMIT_STEPS, WARMUP_SHARE * total))
        why = f"{WARMUP_SHARE:.0%} of {total} steps, {WARMUP_LIMIT_STEPS} at most"
        choices.append(ChoiceMade(name="train.warmup_steps", value=str(warmup), because=why))
    else:
        warmup = settings.warmup_steps
    return Schedule(
        total_steps=total,
        warmup_steps=warmup,
        learning_rate=rate,
        choices=tuple(choices),
        told=_few_steps(settings, total, steps_per_epoch),
    )


def _few_steps(settings: TrainSettings, total: int, steps_per_epoch: int) -> tuple[str, ...]:
    """Say that a run ends before it has changed much, where nobody asked for so few steps."""
    if settings.steps is not None or total >= FEW_STEPS:
        return ()
    epochs = math.ceil(_ENOUGH_STEPS / steps_per_epoch)
    return (
        f"the whole run is {total} step{'s' * (total > 1)}, which teaches next to nothing: set "
        f"train.epochs={epochs} for {epochs * steps_per_epoch} steps, lower train.batch_rows, or "
        "add data",
    )


def _steps(settings: TrainSettings, steps_per_epoch: int, about: str) -> tuple[int, str]:
    if settings.steps is not None:
        epochs = settings.steps / steps_per_epoch
        of = _epochs(f"{epochs:.2g}")
        return settings.steps, f"as set; {of} of {about}{steps_per_epoch} steps"
    total = max(1, math.ceil(settings.epochs * steps_per_epoch))
    return total, f"{_epochs(f'{settings.epochs:g}')} of {about}{steps_per_epoch} steps"


def _epochs(count: str) -> str:
    return f"{count} epoch{'s' * (count != '1')}"


ScheduleName = Literal["constant", "linear", "cosine"]


def factor(name: ScheduleName, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return what the base learning rate is multiplied by in update `step`, the first being 0.

    Warm-up rises linearly from 1/warmup_steps to 1, so that no update is lost on a rate of 0.
    Then `constant` stays at 1, while `linear` and `cosine` fall to 0 at step `total_steps` (the
    last update, total_steps - 1, still moves). Past the end the factor stays at the end's value.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if name == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
