"""Runs in fp16: told, resumed to the same bits, and going on after overflows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.core.updates import loss_scale
from fluxtrain.core.updates.loss_scale import LossScale
from fluxtrain.errors import Diverged, Interrupted
from fluxtrain.events import events as ev
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.console import line
from fluxtrain.train.loop import TrainingLoop
from tests.engine.runs import MakeConfig, run

OVERFLOWS = 2.0**32  # for the tiny model; a few halvings below it all is well


@pytest.fixture
def first_scale(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`first_scale(x)`: runs begin with it, and raise it after three steps."""

    def set_to(first: float) -> None:
        made = partial(LossScale, first=first, growth_interval=3)
        monkeypatch.setattr(loss_scale, "LossScale", made)

    return set_to


def steps_of(events: list[Any]) -> list[ev.StepFinished]:
    return [event for event in events if isinstance(event, ev.StepFinished)]


def test_an_fp16_run_learns_and_says_what_it_chose(run_config: MakeConfig, tmp_path: Path) -> None:
    config = run_config(model__dtype="fp16", train__steps=6, train__max_grad_norm=None)
    events = run(config, tmp_path / "run")
    steps = steps_of(events)
    assert [step.loss_scale for step in steps] == [2.0**16] * 6
    assert not any(step.left_out for step in steps)
    assert steps[-1].loss < steps[0].loss
    assert all(step.grad_norm is not None and step.grad_norm < 100 for step in steps)
    hello = [event for event in events if isinstance(event, ev.Hello)][-1]
    assert hello.dtype == "float16"
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    chosen = {choice["name"]: choice for choice in plan["choices"]}["model.dtype"]
    assert (chosen["value"], chosen["because"]) == ("float16", "model.dtype says so")
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float16}


def test_fp16_follows_the_losses_of_fp32(run_config: MakeConfig, tmp_path: Path) -> None:
    found = {
        dtype: [
            step.loss
            for step in steps_of(
                run(run_config(f"{dtype}.yaml", model__dtype=dtype, train__steps=8),
                    tmp_path / dtype)
            )
        ]
        for dtype in ("float16", "float32")
    }  # fmt: skip
    assert found["float16"] == pytest.approx(found["float32"], rel=2e-3)


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_that_overflow_are_left_out_and_told(
    run_config: MakeConfig, tmp_path: Path, first_scale: Any, late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where a step's numbers are read after the next one is queued, as on a GPU."""
    first_scale(OVERFLOWS)
    if late:
        monkeypatch.setattr(TrainingLoop, "_reads_at_once", lambda _: False)
    config = run_config(model__dtype="float16", train__steps=24, train__batch_rows=2)
    steps = steps_of(run(config, tmp_path / "run"))
    assert [step.step for step in steps] == list(range(1, 25))
    left_out = [step.left_out for step in steps]
    assert 0 < sum(left_out) < 20
    assert left_out[0]
    scale = OVERFLOWS
    good = 0
    for step in steps:
        assert step.loss_scale == scale
        assert (step.grad_norm is None) == step.left_out
        good = 0 if step.left_out else good + 1
        scale = scale / 2 if step.left_out else scale * (2 if good == 3 else 1)
        good %= 3
    told = line(steps[0])
    assert told is not None
    assert "left out" in told
    made = [step for step in steps if not step.left_out]
    assert made[-1].loss < made[0].loss


def test_a_stopped_fp16_run_goes_on_with_the_same_bits(
    run_config: MakeConfig, tmp_path: Path, first_scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of the overflows: the scale and its count are in the checkpoint."""
    first_scale(OVERFLOWS)
    config = run_config(model__dtype="float16", train__steps=20, train__checkpoint_every=5,
                        train__batch_rows=2)  # fmt: skip
    whole = steps_of(run(config, tmp_path / "whole"))
    assert any(step.left_out for step in whole[5:])
    between = TrainingLoop._between_steps

    def stop(self: TrainingLoop) -> None:
        between(self)
        if self.state.step == 7:
            self._requests.stop(130)

    monkeypatch.setattr(TrainingLoop, "_between_steps", stop)
    with pytest.raises(Interrupted):
        run(config, tmp_path / "parts")
    monkeypatch.setattr(TrainingLoop, "_between_steps", between)
    parts = steps_of(run(config, tmp_path / "parts", resume="auto"))

    def told(steps: list[ev.StepFinished]) -> list[Any]:
        return [(s.step, s.loss, s.grad_norm, s.loss_scale, s.left_out) for s in steps]

    assert told(parts) == told(whole)
    left, right = (load_file(tmp_path / name / "model" / "model.safetensors")
                   for name in ("whole", "parts"))  # fmt: skip
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_gradients_that_overflow_unscaled_end_the_run(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_scale: Any
) -> None:
    first_scale(1.0)
    scaled = LossScale.of
    monkeypatch.setattr(LossScale, "of", lambda self, loss: scaled(self, loss) * 1e9)
    with pytest.raises(Diverged, match="float32"):
        run(run_config(model__dtype="float16"), tmp_path / "run")


def test_a_plan_for_an_old_card_is_fp16_and_counts_its_masters(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    from fluxtrain.plan.machine_file import read_machine_file

    def planned(capability: str) -> PlanAnswer:
        gpu = {"memory_total_bytes": 16 << 30, "compute_capability": capability}
        machine = {"memory_total_bytes": 32 << 30, "gpus": [gpu]}
        place = tmp_path / "machine.json"
        place.write_text(json.dumps({"machine": machine}))
        config = load_config(run_config(placement__device="auto"))
        return preview(config, read_machine_file(place))

    old, new = planned("7.5"), planned("8.6")
    assert (old.model.dtype, new.model.dtype) == ("float16", "bfloat16")
    reasons = {choice.name: choice.because for choice in old.choices}
    assert "7.5" in reasons["model.dtype"]
    states = [plan.need["arena_bytes"] + plan.need["optimizer_bytes"] for plan in (old, new)]
    assert states[0] > states[1]
