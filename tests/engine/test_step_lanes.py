"""The lanes of real steps: they cover what happened, in the order in which it can happen."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fluxtrain.config.schema import load_config
from fluxtrain.core.device.recorder import HostClock, Recorder
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.errors import BadInput
from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.trace.lanes import BUSY_LANES, Interval, StepLanes
from fluxtrain.events.trace.ring import read_ring
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.observe.timeline import StepCutter, TimelineThread
from fluxtrain.train.run import train
from tests.wrap_with import wrap_with

BLOCKS = ("model.layers.0", "model.layers.1", "model.layers.2")
Make = Callable[..., PreTrainedModel]
MakeBatch = Callable[..., dict[str, torch.Tensor]]


def recorded(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], steps: int = 4, **options: object
) -> tuple[list[StepLanes], Engine]:
    """Some steps of a loop whose borders are told to the recorder."""
    options = {"device": "cpu", "offload": "weights", **options}
    wrapped = wrap_with(model, **options)
    engine = engine_of(wrapped)
    recorder = engine.device.recorder
    cutter = StepCutter(recorder)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    found: list[StepLanes] = []
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        wrapped(**batch).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += cutter.ready()
    engine.flush()
    recorder.end_step()
    while recorder.notes:
        found += cutter.ready()
        time.sleep(0.001)
    engine.close()
    return found, engine


def of(step: StepLanes, lane: str, kind: str, name: str) -> list[Interval]:
    wanted = (lane, kind, name)
    return [one for one in step.intervals if (one.lane, one.kind, one.name) == wanted]


def union_s(step: StepLanes, lane: str) -> float:
    covered, until = 0.0, 0.0
    for one in sorted((i for i in step.intervals if i.lane == lane), key=lambda i: i.start_s):
        covered += max(0.0, one.stop_s - max(until, one.start_s))
        until = max(until, one.stop_s)
    return covered


@pytest.mark.parametrize("overlap", [False, True])
def test_a_streamed_block_is_copied_computed_sent_home_and_updated_in_this_order(
    tiny: Make, batch: MakeBatch, overlap: bool
) -> None:
    steps, _ = recorded(tiny("llama"), batch("llama"), overlap=overlap)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    whole_run = steps[0]
    offset_s = whole_run.length_s
    later = [one._replace(start_s=one.start_s + offset_s) for one in steps[1].intervals]
    both = StepLanes(step=1, wall_s=0, length_s=9, intervals=[*whole_run.intervals, *later])
    for name in BLOCKS:
        (forward,) = of(whole_run, "gpu", "forward", name)
        (backward,) = of(whole_run, "gpu", "backward", name)
        home = of(both, "d2h", "gradients", name)[0]
        copies = of(whole_run, "h2d", "weights", name)
        update = of(both, "cpu", "update", name)[0]
        assert any(one.stop_s <= forward.start_s for one in copies)
        assert forward.stop_s <= backward.start_s
        assert home.start_s >= backward.stop_s
        assert update.start_s >= home.stop_s


@pytest.mark.parametrize("offload", ["none", "optimizer", "weights", "max"])
def test_no_interval_leaves_its_step_or_is_negative_and_no_lane_is_busier_than_the_step(
    tiny: Make, batch: MakeBatch, offload: str
) -> None:
    steps, _ = recorded(tiny("llama"), batch("llama"), offload=offload, chunk_rows=2)
    for step in steps:
        assert step.length_s > 0 and (step.merged, step.late, step.dropped) == (0, 0, 0)
        for one in step.intervals:
            assert one.start_s >= 0 and one.duration_s >= 0
            assert one.stop_s <= step.length_s + 1e-9
        for lane in BUSY_LANES:
            alone = sum(one.duration_s for one in step.intervals if one.lane == lane)
            assert union_s(step, lane) == pytest.approx(alone, abs=1e-9), "one thing at a time"
            assert alone <= step.length_s + 1e-9
        kinds = {(one.lane, one.kind) for one in step.intervals}
        assert ("d2h", "activations") in kinds or offload != "max"
        assert (("gpu" if offload == "none" else "cpu"), "update") in kinds
    assert any(i.lane == "h2d" for s in steps for i in s.intervals) == (offload != "none")


def test_an_update_that_runs_into_the_next_step_is_in_both_and_sums_to_itself() -> None:
    recorder = Recorder(HostClock())
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    with recorder.working("cpu", "update", "a"):
        time.sleep(0.004)
        recorder.begin_step(2)
        assert cutter.ready() == []  # the update of step 1 is not over
        time.sleep(0.004)
    recorder.end_step()
    first, second = cutter.ready()
    (before,), (after,) = first.intervals, second.intervals
    assert before.goes_on and not before.began_before
    assert after.began_before and not after.goes_on and after.start_s == 0
    assert before.stop_s == pytest.approx(first.length_s, abs=1e-9)
    assert before.duration_s + after.duration_s >= 0.008


def test_a_wait_of_the_computation_is_a_stall_with_its_cause() -> None:
    recorder = Recorder(HostClock())
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    time.sleep(0.003)
    recorder.host_waited("weights", 0.002)
    recorder.end_step()
    ((one,),) = [step.intervals for step in cutter.ready()]
    assert (one.lane, one.kind) == ("stall", "weights")
    assert one.duration_s == pytest.approx(0.002, abs=1e-6)


def test_a_run_leaves_the_lanes_of_its_steps_in_its_ring(
    run_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = load_config(run_config(train__steps=5, train__checkpoint_every=2), [])
    config = config.model_copy(update={"placement": replace(config.placement, offload="weights")})
    run_dir = tmp_path / "run"
    train(config, locate(None, run_dir, config))
    steps = read_ring(run_dir / "timeline.ring")
    told = [e for e in read_events(run_dir / "events.ndjson") if isinstance(e, StepFinished)]
    assert [step.step for step in steps] == [step.step for step in told]
    for step, event in zip(steps, told, strict=True):
        # a checkpoint is written beside the steps
        between_s = sum(one.duration_s for one in step.intervals if one.kind == "evaluation")
        assert 0.5 * event.step_s <= step.length_s - between_s
        assert {"gpu", "d2h", "host"} <= {one.lane for one in step.intervals}
    copied = {one.lane for step in steps for one in step.intervals}
    assert "h2d" in copied  # in which step is open: the first blocks are copied ahead of theirs
    written = {s.step for s in steps if any(one.lane == "disk" for one in s.intervals)}
    assert 1 not in written and 5 in written
    assert written & {2, 3} and written & {4, 5}, "after a step, or beside the next"
    assert any(one.kind == "evaluation" for one in steps[1].intervals)


def test_a_trained_run_gives_a_summary_and_a_trace_and_train_writes_one_itself(
    run_config: Callable[..., Path], tmp_path: Path, fluxtrain: Callable[..., Any]
) -> None:
    config = run_config(train__steps=3)
    run, trace = tmp_path / "run", tmp_path / "trace.json.gz"
    done = fluxtrain("train", config, "--run-dir", run, "--trace", trace)
    assert done.returncode == 0, done.stderr
    assert "trace of 3 steps" in done.stderr
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {1, 2, 3}
    told = fluxtrain("trace", run, "--summary").stdout
    assert "last: step 3" in told and "median of 3" in told and told.count("bound:") == 2
    assert fluxtrain("trace", run).returncode == 0 and (run / "trace.json.gz").exists()
    refused = fluxtrain("train", config, "--run-dir", tmp_path / "b", "--trace", tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("what", ["open_to_write", "RingWriter.write"])
@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), BadInput("timeline.ring is a link"), KeyError("bug")],
)
def test_a_timeline_that_cannot_be_kept_is_told_once_and_stops_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
) -> None:
    if what == "open_to_write" and isinstance(error, KeyError):
        return  # a bug of ours ends the run before its first step

    def fail(*_: object) -> int:
        raise error

    said: list[str] = []
    recorder = Recorder(HostClock())
    thread = TimelineThread(tmp_path / "timeline.ring", said.append)
    monkeypatch.setattr(f"fluxtrain.events.trace.ring.{what}", fail)
    thread.watch(recorder)
    recorder.begin_step(1)
    recorder.begin_step(2)
    until_s = time.monotonic() + 60
    while not said and time.monotonic() < until_s:
        time.sleep(0.01)
    recorder.begin_step(3)
    recorder.host_did("data", 1.0, 2.0)
    assert not recorder.notes and not recorder.recording
    thread.close()
    assert len(said) == 1 and "timeline.ring" in said[0] and "goes on" in said[0]
