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
from fluxtrain.core.device.recorder import Border, HostClock, Note, Recorder
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.lanes import BUSY_LANES, Interval, StepLanes
from fluxtrain.events.trace.ring import read_ring
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.evaluate import evaluate
from fluxtrain.train.observe.step_cutter import StepCutter
from fluxtrain.train.observe.timeline import RECENT_STEPS, TimelineThread
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


def test_each_block_is_computed_once_in_each_direction_and_the_head_once(
    tiny: Make, batch: MakeBatch
) -> None:
    steps, engine = recorded(tiny("llama"), batch("llama"))
    for step in steps[1:]:
        for name in BLOCKS:
            assert len(of(step, "gpu", "forward", name)) == 1
            assert len(of(step, "gpu", "backward", name)) == 1
        assert [one.name for one in step.intervals if one.kind == "head"] == ["lm_head"]
    moved = sum(one.lane == "h2d" for step in steps for one in step.intervals)
    again = sum(one.lane == "h2d" and one.began_before for s in steps for one in s.intervals)
    assert engine.traffic().h2d_bytes > 0 and moved - again > 0


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


class LateClock(HostClock):
    """The computation comes to a border some time after it was noted, as a busy GPU does."""

    def __init__(self) -> None:
        self._to_come: list[Border] = []

    def border(self, step: int) -> Border:
        border = super().border(step)
        border.instant = None
        self._to_come.append(border)
        return border

    def arrive(self) -> None:
        """The computation has come to every border that was noted."""
        for border in self._to_come:
            border.instant = time.perf_counter()
        self._to_come.clear()

    def anchor_at(self, border: Border) -> float | None:
        return None if border.instant is None else float(border.instant)


def test_what_began_before_the_computation_came_to_a_border_is_of_the_step_before() -> None:
    clock = LateClock()
    recorder = Recorder(clock)
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    clock.arrive()
    recorder.begin_step(2)
    with recorder.working("cpu", "update", "a"):
        pass
    assert cutter.ready() == []
    with recorder.working("cpu", "update", "b"):
        clock.arrive()
        assert cutter.ready() == []  # the border has passed, and "b" began before it
        recorder.end_step()
    clock.arrive()
    first, second = cutter.ready()
    assert [one.name for one in first.intervals] == ["a", "b"]
    assert [one.name for one in second.intervals] == ["b"]
    assert [one.began_before for one in (*first.intervals, *second.intervals)] == [
        False, False, True,
    ]  # fmt: skip
    assert (first.late, second.late) == (0, 0)


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


def test_nothing_is_noted_outside_a_step_and_an_evaluation_is_one_interval() -> None:
    recorder = Recorder(HostClock())
    cutter = StepCutter(recorder)

    def compute() -> None:
        recorder.computed("forward", "a", recorder.instant())

    compute()
    with recorder.working("disk", "checkpoint", ""):
        assert not recorder.notes
    recorder.begin_step(1)
    compute()
    with recorder.as_one("evaluation"):
        compute()
        compute()
    recorder.end_step()
    compute()
    (step,) = cutter.ready()
    assert [one.kind for one in step.intervals] == ["forward", "evaluation"]
    assert not recorder.notes


def test_notes_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxtrain.core.device.recorder._MOST_NOTES", 10)
    recorder = Recorder(HostClock())
    recorder.begin_step(1)
    for _ in range(50):
        recorder.host_did("data", 1.0, 2.0)
    recorder.end_step()
    (step,) = StepCutter(recorder).ready()
    assert step.dropped == 41
    assert sum(isinstance(note, Border) for note in recorder.notes) == 0


class Never:
    """A copy that is never issued."""

    def instants(self) -> None:
        return None

    def failed(self) -> bool:
        return False


def test_what_is_never_known_holds_up_some_steps_and_is_then_counted_as_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fluxtrain.train.observe.step_cutter._MOST_WAITING", 2)
    recorder = Recorder(HostClock())
    cutter = StepCutter(recorder)
    recorder.begin_step(1)
    recorder.copied("h2d", "weights", "a", Never())
    for step in (2, 3):
        recorder.begin_step(step)
        assert cutter.ready() == []
    recorder.begin_step(4)
    assert [(step.step, step.late) for step in cutter.ready()] == [(1, 1), (2, 0), (3, 0)]
    assert all(not isinstance(note, Note) for note in recorder.notes)


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


def test_the_recorded_step_is_accounted_for_and_its_bound_is_named(
    tiny: Make, batch: MakeBatch
) -> None:
    steps, _ = recorded(tiny("llama"), batch("llama"), overlap=True)
    for step in steps:
        found = attribute(step)
        waits_s = sum(found.waits_s.values())
        assert found.busy_s["gpu"] + waits_s == pytest.approx(step.length_s, rel=1e-6)
        assert found.busy_s["gpu"] > 0 and found.busy_s["cpu"] >= 0
        assert {"forward", "head", "backward"} <= found.work_s.keys()


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


def test_what_an_evaluation_waited_for_is_no_stall_of_the_next_step(
    run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waiting(objective: Any, model: torch.nn.Module, *arguments: Any) -> Any:
        engine_of(model).device.stalls.add("weights", 1000.0)
        return evaluate(objective, model, *arguments)

    monkeypatch.setattr("fluxtrain.train.loop.evaluate", waiting)
    config = load_config(run_config(train__steps=3, train__evaluate_every=1), [])
    train(config, locate(None, tmp_path / "run", config))
    told = list(read_events(tmp_path / "run" / "events.ndjson"))
    stalls_s = [sum(e.stalls_s.values()) for e in told if isinstance(e, StepFinished)]
    assert len(stalls_s) == 3 and max(stalls_s) < 1000


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("a bug")])
def test_a_timeline_that_fails_on_the_way_is_told_once_and_stops_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    said: list[str] = []
    recorder = Recorder(HostClock())
    thread = TimelineThread(tmp_path / "timeline.ring", said.append)
    monkeypatch.setattr("fluxtrain.events.trace.ring.RingWriter.write", fail)
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


def test_the_last_steps_are_at_hand_while_they_are_kept(tmp_path: Path) -> None:
    thread = TimelineThread(tmp_path / "timeline.ring", pytest.fail)
    recorder = Recorder(HostClock())
    thread.watch(recorder)
    for number in range(1, RECENT_STEPS + 4):
        recorder.begin_step(number)
    thread.close()
    kept = [one.step for one in thread.recent]
    assert kept == [one.step for one in read_ring(tmp_path / "timeline.ring")][-RECENT_STEPS:]
    assert len(kept) == RECENT_STEPS and kept[-1] == RECENT_STEPS + 3
