"""A GPU that computes no faster than its host queues the work is told apart from a busy one."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest

from fluxtrain.core.device.recorder import Border, HostClock, Recorder
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.lanes import StepLanes
from fluxtrain.train.observe.timeline import StepCutter


class At(NamedTuple):
    """When a point of the computation was queued, and when the GPU came to it."""

    queued_s: float
    came_s: float


class MadeClock(HostClock):
    """A GPU's clock whose points are given by the test."""

    on_host = False

    def __init__(self) -> None:
        self.next: list[At] = []

    def instant(self) -> At:
        return self.next.pop(0)

    def border(self, step: int) -> Border:
        at = self.instant()
        return Border(step, at, at.queued_s, time.time(), at.came_s)

    def seconds(self, instant: At) -> float | None:
        return instant.came_s

    def anchor_at(self, border: Border) -> float | None:
        return float(border.instant.came_s)

    def queued_s(self, instant: At) -> float | None:
        return instant.queued_s


def cut(blocks: list[tuple[At, At]], kind: str = "forward", name: str = "layer") -> StepLanes:
    """One step of ten seconds with these blocks."""
    clock = MadeClock()
    recorder = Recorder(clock)
    clock.next = [At(0.0, 0.0), *(point for block in blocks for point in block), At(10.0, 10.0)]
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    for at, _ in enumerate(blocks):
        recorder.computed(kind, f"{name}{at}" if name else "", recorder.instant())
    recorder.end_step()
    found = cutter.ready(final=True)
    assert len(found) == 1
    return found[0]


def late(step: StepLanes) -> list[tuple[float, float]]:
    return [(one.start_s, one.stop_s) for one in step.intervals if one.lane == "queue"]


def blocks_of(queueing_s: float, computing_s: float, count: int = 8) -> list[tuple[At, At]]:
    """Blocks that the host queues one after the other, and that the GPU computes as they come."""
    made, host_s, gpu_s = [], 1.0, 1.0
    for _ in range(count):
        start = At(host_s, max(gpu_s, host_s))
        host_s += queueing_s
        gpu_s = max(start.came_s + computing_s, host_s + 1e-5)
        made.append((start, At(host_s, gpu_s)))
    return made


def test_blocks_that_are_queued_slower_than_they_compute_are_one_run() -> None:
    step = cut(blocks_of(queueing_s=6e-3, computing_s=2e-3))
    assert late(step) == [pytest.approx((1.0, 1.0 + 8 * 6e-3 + 1e-5))]
    assert attribute(step).queued_s == pytest.approx(8 * 6e-3, rel=0.01)


def test_a_gpu_that_is_behind_by_as_much_all_the_time_is_busy() -> None:
    """A host that waits for the GPU after each block keeps its distance."""
    blocks = [
        (At(1 + at * 5e-3, 1.02 + at * 5e-3), At(1.005 + at * 5e-3, 1.025 + at * 5e-3))
        for at in range(8)
    ]
    assert not late(cut(blocks))


def test_a_gpu_that_catches_up_was_busy_until_then() -> None:
    behind = [(At(1.0, 1.05), At(1.06, 1.0601))]
    assert not late(cut(behind))


def test_a_processor_that_computes_itself_queues_nothing() -> None:
    recorder = Recorder(HostClock())
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    start = recorder.instant()
    recorder.computed("forward", "layer", start)
    recorder.end_step()
    (step,) = cutter.ready(final=True)
    assert [one.lane for one in step.intervals] == ["gpu"]
