"""Runs whose moments come after all weights: told, stopped, resumed, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.config.schema import load_config
from fluxtrain.errors import Interrupted
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.run import train
from tests.engine.runs import MakeConfig, weights


def run(config: Path, run_dir: Path, moments: str, resume: str | None = None) -> list[Any]:
    settings = load_config(config, [f"train.moments={moments}"])
    train(settings, locate(resume, run_dir, settings))
    return told(run_dir)


def told(run_dir: Path) -> list[Any]:
    events = read_events(run_dir / "events.ndjson")
    steps = [event for event in events if isinstance(event, ev.StepFinished)]
    return [(step.step, step.loss, step.grad_norm) for step in steps]


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.thinned(1)
def test_a_run_that_is_stopped_and_goes_on_the_other_way_has_the_same_bits(
    run_config: MakeConfig, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With evaluations and checkpoints in between, and numbers read late, as on a GPU."""
    monkeypatch.setattr(TrainingLoop, "_reads_at_once", lambda _: False)
    config = run_config(
        model__dtype=dtype, train__steps=16, train__checkpoint_every=4, train__evaluate_every=5,
        train__accumulation=2,
    )  # fmt: skip
    whole = run(config, tmp_path / "whole", "with_weights")
    deferred = run(config, tmp_path / "deferred", "deferred")
    assert whole == deferred
    assert_same_weights(tmp_path / "whole", tmp_path / "deferred")
    between = TrainingLoop._between_steps

    def stop(self: TrainingLoop) -> None:
        between(self)
        if self.state.step == 6:
            self._requests.stop(130)

    monkeypatch.setattr(TrainingLoop, "_between_steps", stop)
    with pytest.raises(Interrupted):
        run(config, tmp_path / "parts", "deferred")
    monkeypatch.setattr(TrainingLoop, "_between_steps", between)
    assert run(config, tmp_path / "parts", "with_weights", resume="auto") == whole
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
