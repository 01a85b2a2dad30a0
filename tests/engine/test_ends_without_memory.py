"""Memory that runs out and stays out: what a run has made is kept, and its end names the way on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.errors import Diverged, DoesNotFit
from fluxtrain.events import events as ev
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.models import export
from fluxtrain.train.checkpoint import background
from fluxtrain.train.loop import TrainingLoop
from tests.engine.runs import MakeConfig, run

RAN_OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def losses(events: list[Any]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, ev.StepFinished)}


def warnings(events: list[Any]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, ev.LogWritten))


def ran_out(*_: object, **__: object) -> Any:
    raise RAN_OUT


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_the_steps_that_were_made_are_saved_before_the_end(
    where: str, run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        train__steps=6, train__checkpoint_every="end", train__evaluate_every=3,
        placement__chunk_rows=1,
    )  # fmt: skip
    undisturbed = losses(run(config, tmp_path / "undisturbed"))
    real, calls = Engine.clip_grad_norm, 0

    def clip(engine: Engine, max_norm: float | None, losses: Any = ()) -> Any:
        nonlocal calls
        calls += 1
        return ran_out() if calls >= 4 else real(engine, max_norm, losses)

    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(Engine, "clip_grad_norm", clip)
        else:
            patch.setattr(CausalLM, "metrics", ran_out)
        with pytest.raises(DoesNotFit, match=r"step 4 .*the last good checkpoint is .* \(step 3\)"):
            run(config, tmp_path / "run")
    again = losses(run(config, tmp_path / "run", resume=str(tmp_path / "run")))
    assert again == undisturbed


def test_a_checkpoint_that_finds_no_memory_for_copies_is_written_without(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_copied", ran_out)
    events = run(run_config(train__checkpoint_every=1), tmp_path / "run")
    assert "written during the training (CUDA out of memory" in warnings(events)
    written = [event for event in events if isinstance(event, ev.CheckpointWritten)]
    assert [event.step for event in written] == [2, 3, 4]
    assert all(event.held_s is None for event in written), "training waited for all of them"


def test_a_model_that_cannot_be_saved_for_want_of_memory_says_how_to_go_on(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config()
    with monkeypatch.context() as patch:
        patch.setattr(export, "save_folder", ran_out)
        with pytest.raises(DoesNotFit, match="step-00000004 stands: fluxtrain train --resume"):
            run(config, tmp_path / "run")
    run(config, tmp_path / "run", resume=str(tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(("asked", "chunk"), [(None, 4), (4, 4), (1, 1)])
@pytest.mark.thinned(1)
def test_a_chunk_that_is_set_for_the_resume_is_taken(
    asked: int | None,
    chunk: int,
    run_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a cure that the end for want of memory names."""
    config = run_config(placement__chunk_rows=4)
    run(config, tmp_path / "run", "train.steps=2", "train.schedule=constant")
    seen: list[int] = []
    step = TrainingLoop._step

    def looked(loop: Any) -> None:
        seen.append(loop._engine.chunk_rows)
        step(loop)

    monkeypatch.setattr(TrainingLoop, "_step", looked)
    changed = [] if asked is None else [f"placement.chunk_rows={asked}"]
    where = str(tmp_path / "run")
    events = run(config, tmp_path / "run", "train.schedule=constant", *changed, resume=where)
    assert seen == [chunk, chunk]
    assert ("placement.chunk_rows is 1 now" in warnings(events)) == (chunk == 1)


def test_looking_into_a_loss_that_is_not_finite_needs_no_memory_to_go_on(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=5, train__evaluate_every="end")
    real, looked = CausalLM.loss, 0

    def loss(*given: Any) -> torch.Tensor:
        nonlocal looked
        if not torch.is_grad_enabled():
            looked += 1
            raise RAN_OUT
        return real(*given) * torch.nan

    monkeypatch.setattr(CausalLM, "loss", loss)
    with pytest.raises(Diverged, match="the last of 5 steps in a row"):
        run(config, tmp_path / "run")
    assert looked == 1
