"""Repeat the timing of resident and streamed steps in turn, until two repeats agree.

This is done without a GPU. What streaming costs beside its bytes is there a small difference
between two steps, and counts once for every group of the model. Other programs, and fresh pages
that the operating system (or the host of a virtual machine) has to find first, can slow down all
steps of one kind for a second. They never make a step faster. So the fastest step of each kind
counts, once another repeat comes close to it. Of everything else that is timed, the median over all
repeats counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fluxtrain.measure.block_timing import CPU_LIMIT_S, STEPS, BlockTimes
from fluxtrain.measure.probe.others import BUSY_SHARE, others_share, read_use
from fluxtrain.methods.objective import BoundBatch

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

SAME = 0.05  # steps that differ by less agree
REPEATS_S = 6.5  # no further repeat begins later
MOST_REPEATS = 4
WARMING = 2  # streamed steps: the first touches weights and gradients, the second the moments


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Times of resident and of streamed steps of the small model."""

    sizes: Mapping[str, BlockTimes]  # by name; "many" rows in every repeat
    streamed_s: Sequence[float]  # steps with the many rows, streamed, with their updates
    copied_bytes: int  # of one such step

    @property
    def fastest(self) -> tuple[float, float]:
        """Return the seconds of the fastest resident step of many rows, and of the streamed one."""
        return min(self.sizes["many"].seconds["whole"]), min(self.streamed_s)


@dataclass(frozen=True)
class Repeats:
    """All repeats until two agreed, or the time was up."""

    repeats: Sequence[Repeat]
    others_share: float | None  # of all processors, used by other programs meanwhile

    def sizes(self) -> dict[str, BlockTimes]:
        """Return the times by the name of their size, with the steps of all repeats."""
        found: dict[str, BlockTimes] = {}
        for repeat in self.repeats:
            for name, times in repeat.sizes.items():
                found.setdefault(name, BlockTimes(times.rows)).add(times)
        return found

    def longer_s(self) -> float | None:
        """Return the seconds of the fastest streamed step less those of the fastest resident one.

        None when no two repeats agree while other programs were busy: the difference then says
        more about those programs.
        """
        found = [repeat.fastest for repeat in self.repeats]
        if not agree(found) and (self.others_share or 0.0) >= BUSY_SHARE:
            return None
        resident_s = min(resident for resident, _ in found)
        return min(streamed for _, streamed in found) - resident_s


def until_agreed(
    repeat: Callable[[bool], Repeat], clock: Callable[[], float] = time.monotonic
) -> Repeats:
    """Call `repeat` until two repeats agree, `MOST_REPEATS` are made or `REPEATS_S` are over; its
    argument says whether this is the first."""
    before, started_s = read_use(), clock()
    repeats: list[Repeat] = []
    while True:
        repeats.append(repeat(not repeats))
        late = clock() - started_s > REPEATS_S
        if late or len(repeats) == MOST_REPEATS or agree([one.fastest for one in repeats]):
            return Repeats(repeats, others_share(before))


def agree(fastest: Sequence[tuple[float, float]]) -> bool:
    """Return whether, for both kinds (resident, streamed), a second repeat came close to the
    fastest step."""
    if len(fastest) < 2:
        return False
    pairs = (sorted(seconds)[:2] for seconds in zip(*fastest, strict=True))
    return all(second <= first * (1 + SAME) for first, second in pairs)


def streamed_steps(
    small: nn.Module, engine: Engine, batch: BoundBatch[Any]
) -> tuple[Sequence[float], int]:
    """Return the seconds of whole steps that update all trained weights, and the bytes that one
    step copies."""
    optimizer = torch.optim.AdamW([p for p in small.parameters() if p.requires_grad], lr=1e-5)
    ends_s = [time.perf_counter()]
    while len(ends_s) <= WARMING + STEPS:
        batch.loss(small).backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        if len(ends_s) > 1 + WARMING and ends_s[-1] - ends_s[WARMING] > 2 * CPU_LIMIT_S:
            break
    engine.flush()
    traffic = engine.traffic()
    steps_s = [after - before for before, after in pairwise(ends_s)]
    return steps_s[WARMING:], (traffic.h2d_bytes + traffic.d2h_bytes) // len(steps_s)
