"""A measured rate, or the reason why there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """`per_s` in bytes or operations a second; `how` says what was timed, or why nothing was."""

    per_s: float | None
    how: str


def best_rate(work: float, action: Callable[[], object], *, repeats: int, limit_s: float) -> float:
    """Work a second of the fastest of some timed calls; the first call only warms up.

    The fastest, because everything else on the machine can only slow a call down. Stops early when
    `limit_s` is used up, but times at least once.
    """
    start_s = time.perf_counter()
    action()
    fastest_s = float("inf")
    for _ in range(repeats):
        before_s = time.perf_counter()
        action()
        after_s = time.perf_counter()
        fastest_s = min(fastest_s, after_s - before_s)
        if after_s - start_s > limit_s:
            break
    return work / max(fastest_s, 1e-9)


def sustained_rate(
    work: float, action: Callable[[], object], *, repeats: int, limit_s: float
) -> float:
    """Work a second over all of some calls together, after one that only warms up: what is reached
    for long, beside whatever else runs meanwhile."""
    action()
    start_s = time.perf_counter()
    done = 0
    while done < repeats:
        action()
        done += 1
        if time.perf_counter() - start_s > limit_s:
            break
    return work * done / max(time.perf_counter() - start_s, 1e-9)
