"""Learning rate schedules: pure functions of the step number."""

from __future__ import annotations

import math
from typing import Literal

from fluxtrain.errors import BadInput

ScheduleName = Literal["constant", "linear", "cosine"]


def factor(name: ScheduleName, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """What the base learning rate is multiplied by in update number `step`, the first being 0.

    Warm-up rises linearly from 1/warmup_steps to 1, so that no update is lost on a rate of 0.
    Then `constant` stays at 1, while `linear` and `cosine` fall to 0 at step `total_steps` (the
    last update, total_steps - 1, still moves). Past the end the factor stays at the end's value.
    """
    if step < 0 or warmup_steps < 0 or total_steps < 1:
        raise BadInput(
            f"a schedule needs step >= 0, warmup_steps >= 0 and total_steps >= 1, "
            f"not {step}, {warmup_steps} and {total_steps}"
        )
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if name == "linear":
        return 1.0 - progress
    if name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise BadInput(f"no schedule is called {name!r}: constant, linear or cosine")
