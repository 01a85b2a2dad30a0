"""A real GPU: one that waits for its work is told apart from one that is busy."""

from __future__ import annotations

import time

import pytest
import torch

from fluxtrain.core.device.cuda_device import CudaDevice
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.lanes import StepLanes
from fluxtrain.train.observe.timeline import StepCutter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BLOCKS = 20
SMALL_CYCLES, LARGE_CYCLES = 20_000, 10_000_000  # 10 us, and some ms
PYTHON_S = 1e-3  # that the host takes between two kernels


def trained(cycles: int, python_s: float, steps: int = 4) -> list[StepLanes]:
    """Steps of blocks of a kernel each, before which the host is busy with something else."""
    device = CudaDevice(torch.device("cuda", 0))
    recorder, cutter = device.recorder, StepCutter(device.recorder)
    found: list[StepLanes] = []
    for step in range(1, steps + 1):
        torch.cuda.synchronize()
        recorder.begin_step(step)
        for block in range(BLOCKS):
            start = recorder.instant()
            until_s = time.perf_counter() + python_s
            while time.perf_counter() < until_s:
                pass
            torch.cuda._sleep(cycles)
            recorder.computed("forward", f"layer{block}", start)
    torch.cuda.synchronize()
    recorder.end_step()
    until_s = time.monotonic() + 20
    while len(found) < steps and time.monotonic() < until_s:
        torch.cuda.synchronize()
        found += cutter.ready()
    device.close()
    assert len(found) == steps
    return found[1:]


def test_small_kernels_that_come_late_are_queued_late() -> None:
    for step in trained(SMALL_CYCLES, PYTHON_S):
        one = attribute(step)
        assert one.queued_s > 0.8 * BLOCKS * PYTHON_S, one
        assert one.bound == "host" and "queued late by the host" in one.because


def test_large_kernels_that_were_queued_long_ago_are_computation() -> None:
    for step in trained(LARGE_CYCLES, 0.0):
        one = attribute(step)
        assert one.queued_s < 0.15 * one.busy_s["gpu"], one
        assert one.bound == "gpu", one.told
