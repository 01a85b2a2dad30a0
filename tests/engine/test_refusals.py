"""Steps that are not finite are skipped and counted; several in a row end the run by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.errors import Diverged
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.step_outcome import MOST_IN_A_ROW
from tests.engine.runs import MakeConfig, of, run

CLIPS = {"train__max_grad_norm": 1.0, "train__evaluate_every": "end"}


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = read_checkpoint(list_checkpoints(run_dir / "checkpoints")[0])
    return {f"{n}.{k}": t.clone() for n, s in newest.load_shards() for k, t in s.items()}


def breaks(
    monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool], block: int = 1
) -> list[int]:
    """Let the gradient of a group be infinite in some steps of this process."""
    steps: list[int] = []
    real, compute = Engine.clip_grad_norm, TrainingLoop._compute

    def computed(self: TrainingLoop[Any], clock: Any) -> Any:  # calibration clips too
        steps.append(len(steps) + 1)
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "clip_grad_norm", clip)
            return compute(self, clock)

    def clip(self: Engine, max_norm: float | None, losses: Any = ()) -> Any:
        if when(len(steps)):
            for group in self.groups[: block + 1]:  # as it spreads in the backward pass
                group.members[0].parameter.grad.fill_(math.inf)  # type: ignore[union-attr]
        return real(self, max_norm, losses)

    monkeypatch.setattr(TrainingLoop, "_compute", computed)
    return steps


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_skipped_step_changes_no_bit_and_the_run_goes_on(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, states: str
) -> None:
    if late:
        monkeypatch.setattr(TrainingLoop, "_reads_at_once", lambda _: False)
    config = run_config(
        train__steps=3, train__states=states, train__schedule="constant",
        train__warmup_steps=0, train__checkpoint_every=1, train__keep_checkpoints=9, **CLIPS,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        breaks(patched, lambda step: step == 2)
        events = run(config, tmp_path / "run")
    steps = of(ev.StepFinished, events)
    assert [(s.step, s.left_out, s.grad_norm is None) for s in steps] == [
        (1, False, False), (2, True, True), (3, False, False),
    ]  # fmt: skip
    warnings = [e.text for e in of(ev.LogWritten, events) if "was skipped" in e.text]
    assert len(warnings) == 1 and "step 2" in warnings[0]
    assert "the gradient of model.layers.0" in warnings[0]
    saved = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert saved == ["step-00000003", "step-00000001"]
    tensors = final_tensors(tmp_path / "run")
    counts = {int(t) for name, t in tensors.items() if name.endswith(".step")}
    assert counts == {2}, "a skipped step is no step of the moments"
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / saved[0]).trainer_state()["run"]
    assert (state["skipped"], state["skipped_in_a_row"]) == (1, 0)


@pytest.mark.parametrize("late", [False, True])
def test_several_in_a_row_end_the_run_with_4_and_the_block_that_began(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    if late:
        monkeypatch.setattr(TrainingLoop, "_reads_at_once", lambda _: False)
    breaks(monkeypatch, lambda step: step == 2 or step >= 4, block=2)
    config = run_config(train__steps=40, train__checkpoint_every=1, **CLIPS)
    with pytest.raises(Diverged) as ended:
        run(config, tmp_path / "run")
    told = str(ended.value)
    assert ended.value.exit_code == 4
    assert f"the last of {MOST_IN_A_ROW} steps in a row" in told
    assert "began in the gradient of model.layers.1 at step 4" in told
    assert "step-00000003" in told, "the last good checkpoint"
    names = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert names[0] == "step-00000003"


def test_a_loss_that_is_not_finite_is_traced_to_the_first_block(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CausalLM.loss

    def loss(self: Any, model: Any, batch: Any, count: int) -> Any:
        weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
        with torch.no_grad():
            weight.view(-1)[0] = math.nan
        return real(self, model, batch, count)

    monkeypatch.setattr(CausalLM, "loss", loss)
    with pytest.raises(Diverged, match=r"began in the output of model\.layers\.1 at step 1"):
        run(run_config(train__steps=40, **CLIPS), tmp_path / "run")
    events = list(read_events(tmp_path / "run" / "events.ndjson"))
    assert of(ev.StepFinished, events) == []
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert error["exit_code"] == 4
