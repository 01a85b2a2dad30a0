"""`comm.compress: auto`: compress where it is measured to be faster on this link."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed

from fluxtrain.events.events import ChoiceMade
from fluxtrain.parallel.compress.exchange import Exchange
from fluxtrain.parallel.compress.registry import method_named

CANDIDATE = "int8"
LEAST_EXPOSED = 0.05  # of a step: below, no compression can gain more
_LONGEST_S = 1.0  # that each way is measured
_MOST = 20  # times


def choose(raw_s: float, ours_s: float, exposed: float) -> ChoiceMade:
    """Decide between no compression and int8.

    raw_s: seconds to reduce a block's gradients in bf16; ours_s: to encode, send and decode them;
    exposed: share of a step in which ranks communicate and compute nothing.
    """
    took = (
        f"{CANDIDATE} takes {ours_s * 1e3:.2f} ms for a block's gradients, bf16 {raw_s * 1e3:.2f}"
    )
    if exposed < LEAST_EXPOSED:
        because = f"{exposed:.1%} of a step is exposed communication, less than {LEAST_EXPOSED:.0%}"
        return ChoiceMade(name="comm.compress", value="none", because=f"{because}; {took}")
    value = CANDIDATE if ours_s < raw_s else "none"
    because = f"{took}, and {exposed:.1%} of a step is exposed communication"
    return ChoiceMade(name="comm.compress", value=value, because=because)


def measured_link(
    count: int, group: distributed.ProcessGroup, device: torch.device
) -> tuple[float, float]:
    """Return the seconds to sum and scatter `count` numbers in bf16, and by the candidate; the
    slowest rank's. A collective."""
    each = max(1, count // group.size())
    rows = torch.linspace(-1e-3, 1e-3, group.size() * each, device=device).view(-1, each)
    exchange = Exchange(method_named(CANDIDATE), group, device)
    half = rows.to(torch.bfloat16)
    into = half.new_empty(each)
    raw = _timed(lambda: distributed.reduce_scatter(into, list(half), group=group), device)
    ours = _timed(lambda: exchange.scatter_sum(rows, "measured"), device)
    slowest = torch.tensor([raw, ours], dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group=group)
    return float(slowest[0]), float(slowest[1])


def _timed(act: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a collective; the ranks do it equally often."""
    act()
    times: list[float] = []
    for _ in range(_MOST):
        started_s = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_s)
        enough = torch.tensor([sum(times)], dtype=torch.float64, device=device)
        distributed.all_reduce(enough, distributed.ReduceOp.MAX)
        if float(enough) > _LONGEST_S:
            break
    return sorted(times)[len(times) // 2]
