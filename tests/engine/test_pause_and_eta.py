"""The time left is that of steps, not of pauses between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.config.schema import load_config
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.observe.step_clock import RecentSteps
from fluxtrain.train.run import train

PAUSE_S = 1.5


def test_a_pause_is_no_part_of_a_step(
    run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[float] = []
    attend, real = TrainingLoop._attend_requests, RecentSteps.step_took

    def paused(self: TrainingLoop) -> None:
        if self.state.step == 2:
            time.sleep(PAUSE_S)
        attend(self)

    def step_took(self: RecentSteps, seconds: float) -> None:
        took.append(seconds)
        real(self, seconds)

    monkeypatch.setattr(TrainingLoop, "_attend_requests", paused)
    monkeypatch.setattr(RecentSteps, "step_took", step_took)
    started_s = time.perf_counter()
    settings = load_config(run_config(train__steps=4), [])
    train(settings, locate(None, tmp_path / "run", settings))
    whole_s = time.perf_counter() - started_s
    assert len(took) == 4
    assert sum(took) <= whole_s - PAUSE_S
