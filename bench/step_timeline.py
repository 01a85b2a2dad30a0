"""Records the lanes of a benchmark's steps as a run does, and says what bound the median one."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.export import write_trace
from fluxtrain.events.trace.lanes import StepLanes
from fluxtrain.events.trace.ring import read_ring
from fluxtrain.train.observe.timeline import TimelineThread

WARM_UP_STEPS = 3


def timed_steps(steps: Sequence[StepLanes]) -> list[StepLanes]:
    """Those whose seconds count: not the last, which ends when nothing follows it and all is
    flushed, so that its time is no step's."""
    last = max((one.step for one in steps), default=0)
    return [one for one in steps if WARM_UP_STEPS < one.step < last]


def middle(steps: Sequence[StepLanes]) -> StepLanes:
    """The one whose length is nearest to their median."""
    median_s = statistics.median(one.length_s for one in steps)
    return min(steps, key=lambda one: abs(one.length_s - median_s))


class StepTimeline:
    """The timeline thread of a run, for a loop that is no run."""

    def __init__(self, engine: Engine) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fluxtrain-bench-")
        self._ring = Path(self._folder.name) / "timeline.ring"
        self._engine = engine
        self._thread = TimelineThread(self._ring, print)
        self._thread.watch(engine.device.recorder)

    def begins(self, step: int) -> None:
        """Step `step` (from 1) begins."""
        self._engine.device.recorder.begin_step(step)

    def close(self, trace: Path | None = None, name: str = "bench") -> dict[str, Any]:
        """Write the trace of the median step, if it is wanted; where that step's time went."""
        self._engine.flush()
        self._thread.close()
        steps = read_ring(self._ring)
        self._folder.cleanup()
        timed = timed_steps(steps)
        if not timed:
            return {}
        median = middle(timed)
        found = attribute(median)
        if trace is not None:
            write_trace(trace, [median], f"{name}: {found.told}")
        return {
            "bound": found.told,
            "busy_s": {lane: round(seconds, 3) for lane, seconds in found.busy_s.items()},
            "waits_s": {cause: round(seconds, 3) for cause, seconds in found.waits_s.items()},
        }


@contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Write what the device did inside, by kernel, to `path`."""
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        yield
        torch.cuda.synchronize()
    table = recorded.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90
    )
    path.write_text(table)
