"""A measured rate, or the reason why there is none."""

from __future__ import annotations

import time
from collections.abc import Callable

from fluxtrain.events.answers.machine import Rate

_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # torch, CUDA, cuBLAS

TOO_LITTLE = Rate(None, "not measured: too little memory is free")


def failed(error: Exception) -> Rate:
    """Return the rate of a measurement that ended with `error`."""
    why = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, MemoryError) or any(word in str(error) for word in _NO_MEMORY):
        return Rate(None, f"{TOO_LITTLE.how}: {why}")
    return Rate(None, f"not measured: {why}")


def best_rate(work: float, action: Callable[[], object], *, repeats: int, limit_s: float) -> float:
    """Return work a second of the fastest of some timed calls; the first call only warms up.

    The fastest, because other programs can only slow a call down. Stops early when `limit_s` is
    used up, but times at least one call.
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
    """Return work a second over several calls together, after one that only warms up: the rate
    that lasts, with everything else that runs."""
    action()
    start_s = time.perf_counter()
    done = 0
    while done < repeats:
        action()
        done += 1
        if time.perf_counter() - start_s > limit_s:
            break
    return work * done / max(time.perf_counter() - start_s, 1e-9)
