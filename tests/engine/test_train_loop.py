"""The loop: equal to the plain one, truthful about time, stopped before harm is done."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fluxtrain
from fluxtrain.config import choices
from fluxtrain.config.schema import RunConfig, load_config
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.data.batches import BatchSource, in_order
from fluxtrain.errors import Interrupted
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.control import send_command
from fluxtrain.methods.optimizer import parameter_groups
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.train.evaluate import evaluate
from fluxtrain.train.inputs import load_inputs
from fluxtrain.train.loop import TrainingLoop
from tests.engine.runs import MakeConfig, of, run, text_data


def serial_losses(config: RunConfig, steps: int) -> list[tuple[float, float]]:
    """The textbook loop over a wrapped model whose every step waits for its update."""
    inputs = load_inputs(config)
    model = fluxtrain.wrap(inputs.loaded.model, device="cpu", offload="weights", chunk_rows=4)
    assert not engine_of(model).overlap
    settings = config.train
    optimizer = torch.optim.AdamW(
        parameter_groups(model, learning_rate=1e-3, weight_decay=settings.weight_decay,
                         no_decay=settings.no_decay),
        betas=settings.betas, eps=settings.eps,
    )  # fmt: skip
    data = BatchSource(text_data(inputs).trained, 4, settings.accumulation, 0)
    told = []
    for step in range(steps):
        rate = 1e-3 * choices.factor("cosine", step, warmup_steps=1, total_steps=steps)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = rate
        parts = []
        batches = data.next_step()
        for batch in batches:
            loss = model(**batch.inputs(sum(b.predicted for b in batches))).loss
            loss.backward()
            parts.append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or 0.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append((math.fsum(parts), float(norm)))
    return told


def test_without_clipping_blocks_are_updated_at_once_and_the_losses_stay(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    """A limit that no norm reaches is the exact mode, null the in_backward one."""
    config = run_config(train__steps=5)
    exact = run(config, tmp_path / "exact", "train.max_grad_norm=1e9")
    in_backward = run(config, tmp_path / "in_backward", "train.max_grad_norm=null")
    assert [(e.loss, e.grad_norm) for e in of(ev.StepFinished, in_backward)] == [
        (e.loss, e.grad_norm) for e in of(ev.StepFinished, exact)
    ]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_deferred_update_with_clipping_equals_the_serial_loop_bit_for_bit(
    run_config: MakeConfig, tmp_path: Path, dtype: str, accumulation: int
) -> None:
    config = run_config(train__steps=6, train__max_grad_norm=0.5, model__dtype=dtype,
                        train__accumulation=accumulation)  # fmt: skip
    steps = of(ev.StepFinished, run(config, tmp_path / "run"))
    losses, norms = zip(*serial_losses(load_config(config), 6), strict=True)
    assert tuple(step.loss for step in steps) == losses
    assert all(norm > 0.5 for norm in norms[:3])  # clipping was at work
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-6)


def test_the_phases_partition_the_step_and_the_journal_tells_the_whole_story(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    events = run(run_config(train__steps=4, train__checkpoint_every=2), tmp_path / "run")
    assert isinstance(events[0], ev.Hello)
    assert isinstance(events[-1], ev.Done)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    steps = of(ev.StepFinished, events)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert sum(step.phases_s.values()) == pytest.approx(step.step_s, rel=1e-6)
        assert all(seconds >= 0 for seconds in step.phases_s.values())
        assert step.phases_s["forward"] > 0 < step.phases_s["backward"]
        assert step.tokens_per_s == pytest.approx(step.tokens / step.step_s)
    assert steps[-1].total_tokens == sum(step.tokens for step in steps)
    assert [e.step for e in of(ev.EvaluationFinished, events)] == [2, 4]
    assert [e.step for e in of(ev.CheckpointWritten, events)] == [2, 4]
    hello = of(ev.Hello, events)[-1]
    assert hello.blocks == len(of(ev.ResidencySampled, events)[-1].weights)
    assert hello.trained_parameters == hello.parameters > 10_000
    traffic = of(ev.TrafficSampled, events)[-1]
    assert traffic.h2d_bytes > 0
    assert traffic.disk_written_bytes == sum(e.bytes for e in of(ev.CheckpointWritten, events))
    assert of(ev.Heartbeat, events)
    assert of(ev.SampleGenerated, events)[0].prompt


def test_a_finished_run_leaves_a_model_that_evaluates_the_same_without_fluxtrain(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bfloat16")
    done = run(config, tmp_path / "run")[-1]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["exit_code"] == 0
    assert result["step"] == 4
    assert result["evaluation_loss"] == done.evaluation_loss
    assert result["measured_host_peak_bytes"] > 0
    choices = json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]
    assert {choice["name"] for choice in choices} >= {
        "placement.offload",
        "train.batch_rows",
        "train.steps",
    }
    assert "config" in json.loads((tmp_path / "run" / "run.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(done.model_path)
    data = text_data(load_inputs(load_config(config)))
    plain = evaluate(CausalLM(), model, in_order(data.held_out, 4))
    assert plain is not None
    assert plain.loss == pytest.approx(done.evaluation_loss, rel=2e-3)


def test_no_training_row_is_evaluated_and_evaluating_changes_nothing(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    often = run(run_config(train__evaluate_every=1), tmp_path / "often")
    never = run(run_config("never.yaml", data__held_out=0.1, train__evaluate_every="end"),
                tmp_path / "never")  # fmt: skip
    assert len(of(ev.EvaluationFinished, often)) == 4
    assert len(of(ev.EvaluationFinished, never)) == 1
    assert [s.loss for s in of(ev.StepFinished, often)] == [
        s.loss for s in of(ev.StepFinished, never)
    ]
    without = run(run_config("none.yaml", data__held_out=0.0), tmp_path / "none")
    assert not of(ev.EvaluationFinished, without)
    assert without[-1].evaluation_loss is None


def test_numbers_that_are_read_a_step_late_are_the_same(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=7, train__evaluate_every=3, train__checkpoint_every=4)
    told = []
    for late in (False, True):
        if late:
            monkeypatch.setattr(TrainingLoop, "_reads_at_once", lambda _: False)
        events = run(config, tmp_path / str(late), "train.max_grad_norm=0.5")
        steps = of(ev.StepFinished, events)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6, 7]
        told.append(
            [(s.loss, s.grad_norm, s.learning_rate, s.epoch, s.total_tokens) for s in steps]
            + [(e.step, e.loss) for e in of(ev.EvaluationFinished, events)]
            + [(e.step,) for e in of(ev.CheckpointWritten, events)]
        )
    assert told[0] == told[1]


def test_a_step_that_runs_out_of_memory_is_done_again_in_smaller_chunks(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=5)
    undisturbed = of(ev.StepFinished, run(config, tmp_path / "undisturbed"))
    real, calls = Engine.clip_grad_norm, 0

    def clip(self: Engine, max_norm: float | None, losses: Any = ()) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, max_norm, losses)

    monkeypatch.setattr(Engine, "clip_grad_norm", clip)
    events = run(config, tmp_path / "run")
    again = of(ev.StepFinished, events)
    assert [step.step for step in again] == [1, 2, 3, 4, 5]
    assert [s.tokens for s in again] == [s.tokens for s in undisturbed]
    assert [s.loss for s in again] == pytest.approx([s.loss for s in undisturbed], rel=1e-5)
    warnings = [log.text for log in of(ev.LogWritten, events) if log.level == "warning"]
    assert any("chunks of 2 rows instead of 4" in text for text in warnings)
    assert of(ev.AdviceGiven, events)[0].how == "placement.chunk_rows=2"


Condition = Callable[[list[Any]], bool]


def after_step(step: int) -> Condition:
    return lambda events: any(s.step >= step for s in of(ev.StepFinished, events))


def after(kind: type[Any], **wanted: object) -> Condition:
    def seen(events: list[Any]) -> bool:
        return any(
            all(getattr(event, name) == value for name, value in wanted.items())
            for event in of(kind, events)
        )

    return seen


class Controller:
    """Sends commands to a run in this process from another thread, each when its time has come."""

    def __init__(self, run_dir: Path, script: list[tuple[Condition, str]]) -> None:
        self.run_dir, self.script = run_dir, script
        self.answers: list[tuple[bool, str]] = []
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        for condition, command in self.script:
            self._wait(condition)
            answer = send_command(self.run_dir / "ctl.sock", command)
            self.answers.append((answer.ok, answer.message))

    def _wait(self, condition: Condition) -> None:
        deadline = time.monotonic() + 120
        journal = self.run_dir / "events.ndjson"
        while time.monotonic() < deadline:
            if journal.exists() and condition(list(read_events(journal))):
                return
            time.sleep(0.01)


def test_a_run_pauses_goes_on_saves_and_stops_when_told(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = run_config(train__steps=100_000, train__checkpoint_every="end",
                        train__evaluate_every="end")  # fmt: skip
    script = [
        (after_step(1), "dance"),
        (after_step(2), "pause"),
        (after(ev.PhaseChanged, phase="paused"), "checkpoint"),
        (after(ev.CheckpointWritten), "resume"),
        (after_step(20), "stop"),
    ]
    control = Controller(run_dir, script)
    with pytest.raises(Interrupted) as caught:
        run(config, run_dir)
    control.thread.join()
    assert caught.value.exit_code == 143
    assert [ok for ok, _ in control.answers] == [False, True, True, True, True]
    assert "pause, resume, checkpoint, stop" in control.answers[0][1]
    events: list[Any] = list(read_events(run_dir / "events.ndjson"))
    assert [a.command for a in of(ev.CommandAnswered, events)] == [c for _, c in script[1:]]
    phases = [phase.phase for phase in of(ev.PhaseChanged, events)]
    assert phases[-1] == "stopping"
    paused = phases.index("paused")
    assert phases[paused : paused + 4] == ["paused", "saving", "paused", "training"]
    while_paused = events[events.index(of(ev.PhaseChanged, events)[paused]) :]
    end = next(i for i, e in enumerate(while_paused) if e in of(ev.CommandAnswered, events)[2:])
    assert not of(ev.StepFinished, while_paused[:end])
    done = events[-1]
    assert (done.exit_code, done.step) == (143, of(ev.CheckpointWritten, events)[-1].step)
    assert not (run_dir / "ctl.sock").exists()


def test_the_learning_rate_follows_its_schedule(run_config: MakeConfig, tmp_path: Path) -> None:
    config = run_config(train__steps=6, train__warmup_steps=2, train__schedule="linear")
    steps = of(ev.StepFinished, run(config, tmp_path / "run"))
    assert [s.learning_rate for s in steps] == pytest.approx(
        [0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    )
