"""The lanes of steps on a real GPU: the clocks agree, the order holds, nothing waits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.core.device.cuda_device import CudaDevice
from fluxtrain.core.device.current_gpu import CurrentStream
from fluxtrain.core.device.recorder import CudaClock, Recorder
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.lanes import BUSY_LANES, Interval, StepLanes
from fluxtrain.train.observe.timeline import StepCutter
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
CLOCKS_S = 2e-3  # how far the GPU's clock may be off the host's
SLEEP_CYCLES = 40_000_000
HIGHEST_HZ = 3.5e9  # above the clock of any GPU
STEPS = 20
LAYERS = 6


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def cut(cutter: StepCutter, count: int) -> list[StepLanes]:
    found: list[StepLanes] = []
    until_s = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until_s:
        found += cutter.ready()
        time.sleep(0.001)
    assert len(found) == count
    return found


def trained(offload: str, steps: int = 5) -> tuple[list[StepLanes], Engine]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    streamed = {"device_groups": 0, "resident_blocks": 0} if offload == "weights" else {}
    model = wrap_with(model, device="cuda", offload=offload, overlap=True, **streamed)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    recorder, cutter = engine.device.recorder, StepCutter(engine.device.recorder)
    found: list[StepLanes] = []
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        ids = torch.randint(0, 2048, (8, 256))
        model(input_ids=ids, labels=ids).loss.backward()
        engine.clip_grad_norm(1.0).value()
        optimizer.step()
        optimizer.zero_grad()
        found += cutter.ready()
    engine.flush()
    recorder.end_step()
    return found + cut(cutter, steps - len(found)), engine


def of(step: StepLanes, lane: str, kind: str, name: str) -> list[Interval]:
    wanted = (lane, kind, name)
    return [one for one in step.intervals if (one.lane, one.kind, one.name) == wanted]


@pytest.mark.alone  # others' kernels come between
def test_a_computation_is_where_the_host_saw_it() -> None:
    recorder = Recorder(CudaClock(CurrentStream(DEVICE)))
    cutter = StepCutter(recorder)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    seen: list[tuple[float, float]] = []
    begun_s = []
    for step in range(1, STEPS + 1):
        begun_s.append(time.perf_counter())
        recorder.begin_step(step)
        time.sleep(0.01)
        before_s, start = time.perf_counter(), recorder.instant()
        torch.cuda._sleep(SLEEP_CYCLES)
        recorder.computed("forward", "a", start)
        torch.cuda.synchronize()
        seen.append((before_s - begun_s[-1], time.perf_counter() - begun_s[-1]))
    recorder.end_step()
    start_off_s, stop_off_s = [], []
    for lanes, (before_s, after_s) in zip(cut(cutter, STEPS), seen, strict=True):
        (one,) = lanes.intervals
        assert SLEEP_CYCLES / HIGHEST_HZ < one.duration_s < after_s - before_s + 1e-4
        start_off_s.append(abs(one.start_s - before_s))
        stop_off_s.append(abs(one.stop_s - after_s))
    # A GPU that also serves other programs comes to an event when it is this one's turn, so a step
    # may be off by some turns. Clocks that differ are so in every step.
    assert min(start_off_s) < CLOCKS_S
    assert min(stop_off_s) < CLOCKS_S


def test_recording_and_cutting_never_synchronise(no_synchronisation: None) -> None:
    recorder = Recorder(CudaClock(CurrentStream(DEVICE)))
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    start = recorder.instant()
    torch.cuda._sleep(400_000_000)
    recorder.computed("forward", "a", start)
    recorder.begin_step(2)
    before_s = time.perf_counter()
    assert cutter.ready() == []  # the GPU is still at it
    assert time.perf_counter() - before_s < 0.02
    recorder.end_step()
    assert [step.step for step in cut(cutter, 2)] == [1, 2]


@pytest.mark.parametrize("offload", ["weights", "max", "optimizer", "none"])
def test_lanes_of_a_streamed_model_are_whole_and_in_order(offload: str) -> None:
    steps, _ = trained(offload)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    for step in steps[1:]:
        assert (step.merged, step.late, step.dropped) == (0, 0, 0)
        for one in step.intervals:
            assert one.start_s >= 0 and one.duration_s >= 0
            assert one.stop_s <= step.length_s + 1e-6
        found = attribute(step)
        assert found.busy_s["gpu"] + sum(found.waits_s.values()) == pytest.approx(step.length_s)
        assert all(found.busy_s[lane] <= step.length_s + 1e-6 for lane in BUSY_LANES)
        for i in range(LAYERS):
            name = f"model.layers.{i}"
            (forward,), (backward,) = (
                of(step, "gpu", kind, name) for kind in ("forward", "backward")
            )
            assert forward.stop_s <= backward.start_s
            for home in of(step, "d2h", "gradients", name):
                assert home.start_s >= backward.stop_s - 1e-5
    lanes = {one.lane for step in steps for one in step.intervals}
    assert ("h2d" in lanes) == (offload != "none")
    assert ("cpu" in lanes) == (offload != "none")


def test_borders_on_the_gpu_and_on_the_host_do_not_drift_apart() -> None:
    device = CudaDevice(DEVICE)
    clock = device.recorder.clock
    for _ in range(200):
        torch.cuda._sleep(2_000_000)
        queued_s = time.perf_counter()
        border = clock.border(1)
        torch.cuda.synchronize()
        clock.instant()  # sees that the border has passed
        now_s = time.perf_counter()
        at_s = clock.anchor_at(border)
        assert at_s is not None and queued_s <= at_s <= now_s  # others may compute between
    device.close()
