"""A method brings its own task: objective, batches and held-out rows that are no packed text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.config.schema import RunConfig, load_config
from fluxtrain.errors import BadInput
from fluxtrain.events.events import SampleFit
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.methods import method
from fluxtrain.methods.objective import BoundTask, Part, Task
from fluxtrain.models.loading import LoadedModel
from fluxtrain.train.checkpoint.recovery import Target
from fluxtrain.train.run import train
from tests.engine.toy_objectives import Pairs, Preference, Stream

PAIRS = 12


class PreferenceOfModel(Preference):
    """Preference pairs over a Hugging Face model, against its weights at the start."""

    def _margins(self, model: nn.Module, batch: Pairs) -> Tensor:
        ids = torch.cat([batch.chosen, batch.rejected])
        with torch.no_grad():
            before = _log_probabilities(self.reference, ids)
        now = _log_probabilities(model, ids)
        chosen, rejected = (now - before.to(now.device)).chunk(2)
        return self.beta * (chosen - rejected)


def _log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    logits = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float(), -1)
    targets = ids[:, 1:, None].to(logits.device)
    return logits.gather(-1, targets).squeeze(-1).sum(-1)


@dataclass(frozen=True, kw_only=True)
class PairsTask(Task[Pairs]):
    """Random pairs of token sequences."""

    pairs: Pairs
    accumulation: int

    def notes(self, part: Part) -> Sequence[str]:
        return ["these pairs are random"]

    def rows(self, part: Part) -> int:
        return len(self.pairs.chosen)

    def fingerprint(self, part: Part) -> str | None:
        return str(int(self.pairs.chosen.sum()))

    def sample_fit(self) -> SampleFit:
        return SampleFit(samples=self.rows("trained"), longer=0, cut=0, divided=0, left_out=0)

    def bound(self, batch_rows: int) -> BoundTask[Pairs]:
        if batch_rows > self.rows("trained"):
            raise BadInput(f"a step takes {batch_rows} pairs: lower train.batch_rows")
        stream = Stream(list(self.in_order("trained", batch_rows)))
        stream.batches_a_step = self.accumulation
        return BoundTask(
            objective=self.objective,
            data=stream,
            held_out=lambda: self.in_order("held_out", batch_rows),
        )

    def in_order(self, part: Part, batch_rows: int) -> Iterable[Pairs]:
        halves = self.pairs.chosen.split(batch_rows), self.pairs.rejected.split(batch_rows)
        return [Pairs(*half) for half in zip(*halves, strict=True)]

    def typical(self, rows: int) -> Pairs:
        return next(iter(self.in_order("trained", rows)))

    def fullest(self, rows: int) -> Pairs | None:
        return None


class PreferenceTuning(method.FullFineTuning):
    """Full fine-tuning on preference pairs."""

    def task(self, config: RunConfig, loaded: LoadedModel, *_: Any) -> PairsTask:
        draws = torch.Generator().manual_seed(3)
        shape = (PAIRS, config.data.row_tokens)
        chosen, rejected = (torch.randint(0, 40, shape, generator=draws) for _ in range(2))
        return PairsTask(
            objective=PreferenceOfModel(loaded.model),
            source="random pairs",
            choices=(),
            uneven=False,
            ends=(),
            prompt=None,
            pairs=Pairs(chosen, rejected),
            accumulation=config.train.accumulation,
        )


def evaluations(run_dir: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run_dir.journal.read_text().splitlines()]
    return [line for line in lines if line["event"] == "evaluation"]


def test_a_run_learns_what_its_method_brings_and_never_looks_into_a_batch(
    run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(method.METHODS, "full", PreferenceTuning())
    config = load_config(run_config(train__steps=6, train__learning_rate=1e-2))
    run_dir = RunDir(tmp_path / "pairs")
    train(config, Target(run_dir=run_dir, resumes=False))
    found = evaluations(run_dir)
    assert found[0]["loss"] < 0.6931 and found[-1]["loss"] < found[0]["loss"]
    assert "these pairs are random" in run_dir.journal.read_text()
    assert json.loads(run_dir.result.read_text())["exit_code"] == 0


def test_a_batch_beyond_the_data_of_a_task_is_refused_before_training(
    run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(method.METHODS, "full", PreferenceTuning())
    config = load_config(run_config(train__batch_rows=PAIRS + 1))
    with pytest.raises(BadInput, match="13 pairs"):
        train(config, Target(run_dir=RunDir(tmp_path / "pairs"), resumes=False))
