"""Device memory that runs out outside of blocks, where a model is evaluated or writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.errors import DoesNotFit
from fluxtrain.events import events as ev
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.models.generate import batch
from fluxtrain.models.generate.prompts import Prompting, UserPrompt
from fluxtrain.results import generation_session as sessions
from fluxtrain.results.generation_session import Batches, GenerationSession, measure
from fluxtrain.train.observe.host_room import HostRoom
from fluxtrain.train.session import Session as RunSession
from fluxtrain.units import GIB, MIB
from tests.engine.runs import MakeConfig, losses, run
from tests.engine.test_evaluate import evaluated
from tests.engine.test_generate import GREEDY
from tests.engine.test_train_cards import SIZES
from tests.engine.used_models import opened

Folder = Callable[..., Path]


def fails_beyond(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let evaluations of more rows run out of memory; return how many rows each had."""
    whole, asked = CausalLM.metrics, list[int]()

    def metrics(self: CausalLM, model: Any, batch: Any) -> Any:
        asked.append(len(batch.input_ids))
        if asked[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return whole(self, model, batch)

    monkeypatch.setattr(CausalLM, "metrics", metrics)
    return asked


def test_an_evaluation_goes_on_with_smaller_batches(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = model_folder("llama"), tmp_path / "text.txt"
    text.write_text("\n\n".join("the quick brown fox jumps over the dog " * 9 for _ in range(9)))
    wanted = evaluated(folder, text, sequence_length=32)
    assert wanted.batch_rows > 4
    asked = fails_beyond(monkeypatch, 3)
    found = evaluated(folder, text, sequence_length=32)
    assert found.batch_rows <= 3 < wanted.batch_rows
    assert found.tokens == wanted.tokens and found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert asked[0] == wanted.batch_rows
    fails_beyond(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(folder, text, sequence_length=32)


def test_answers_to_a_file_are_written_fewer_at_once(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [UserPrompt(text=f"number {n}", where=f"line {n}") for n in range(7)]
    plain, sizes = batch.write, list[int]()

    def write(model: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(model, batch, *rest, **more)

    with opened(model_folder("llama")) as model:
        session = GenerationSession(
            opened=model, prompting=Prompting(model, plain=True), sampling=GREEDY,
            measured=measure(model),
        )  # fmt: skip
        wanted = [one.text for one in Batches(session, prompts, None).answers(lambda: False)]
        monkeypatch.setattr(sessions, "write", write)
        found = [one.text for one in Batches(session, prompts, None).answers(lambda: False)]
    assert found == wanted and len(found) == 7
    assert sizes == [7, 4, 2, 2, 2, 1]


def test_an_evaluation_of_a_run_is_done_again_with_less_on_the_device(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("placement.chunk_rows=4",)
    whole = run(run_config(**SIZES), tmp_path / "whole", *how)
    metrics, failed = CausalLM.metrics, list[int]()

    def ran_out(self: CausalLM, *given: Any) -> Any:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return metrics(self, *given)

    monkeypatch.setattr(CausalLM, "metrics", ran_out)
    found = run(run_config(**SIZES), tmp_path / "short", *how)
    changes = [(e.name, e.after, e.why) for e in found if isinstance(e, ev.ChangeApplied)]
    assert changes == [("chunk_rows", 2, "memory")]
    losses = [[e.loss for e in events if isinstance(e, ev.EvaluationFinished)] for events in
              (whole, found)]  # fmt: skip
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_whose_host_runs_out_ends_with_its_checkpoint_and_goes_on_later(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(run_config(**SIZES), tmp_path / "whole")
    loss, made = CausalLM.loss, list[int]()
    opened_sessions: list[RunSession] = []

    def noted(*given: Any, **more: Any) -> RunSession:
        opened_sessions.append(RunSession(*given, **more))
        return opened_sessions[-1]

    def ends(why: str) -> None:
        opened_sessions[0].requests.end_for_lack(why)

    def runs_out(self: CausalLM, *given: Any) -> Any:
        made.append(1)
        if len(made) == 3:
            for _ in range(3):
                room._looked_s = None
                room.look()
        return loss(self, *given)

    monkeypatch.setattr("fluxtrain.train.run.Session", noted)
    monkeypatch.setattr(CausalLM, "loss", runs_out)
    room = HostRoom(lambda _: None, ends, lambda _: False, read=lambda: (24 * GIB, 10 * MIB))
    with pytest.raises(DoesNotFit, match=r"host memory ran out: 10\.0 MiB of 24\.0 GiB") as caught:
        run(run_config(**SIZES), tmp_path / "run")
    assert caught.value.exit_code == 3 and "step-00000003" in str(caught.value)
    monkeypatch.setattr(CausalLM, "loss", loss)
    again = run(run_config(**SIZES), tmp_path / "run", resume=str(tmp_path / "run"))
    assert losses(again) == losses(whole)


def test_an_evaluation_that_is_not_finite_keeps_no_checkpoint_from_being_written(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = CausalLM.metrics

    def infinite(self: CausalLM, *given: Any) -> Any:
        return {name: float("nan") for name in metrics(self, *given)}

    monkeypatch.setattr(CausalLM, "metrics", infinite)
    config = run_config(**{**SIZES, "train__checkpoint_every": 2})
    events = run(config, tmp_path / "run")
    assert [e.step for e in events if isinstance(e, ev.CheckpointWritten)] == [2, 4, 6]
    again = run(config, tmp_path / "run", "train.steps=8", resume=str(tmp_path / "run"))
    assert len(losses(again)) == 8
