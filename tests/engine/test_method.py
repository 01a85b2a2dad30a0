"""A method says what is trained and what is saved, and plugs in without another change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxtrain.config.schema import MethodSettings, RunConfig, load_config, validate
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.methods import method as methods
from fluxtrain.methods.method import METHODS, FullFineTuning, method_of
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.run import train

MakeConfig = Callable[..., Path]
SAVED = "head.safetensors"


class HeadAlone(FullFineTuning):
    """Trains the output layer, and saves that alone."""

    def prepare(self, model: Any, config: RunConfig) -> tuple[()]:
        self.before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        return ()

    def saved_bytes(self, facts: ModelFacts) -> int:
        return sum(group.trained for group in facts.groups) * 4

    def save(self, loaded: Any, settings: Any, folder: Path) -> None:
        model = loaded.model
        folder.mkdir()
        save_file({"lm_head": model.lm_head.weight.detach().clone()}, folder / SAVED)
        self.after = {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture
def head_alone(monkeypatch: pytest.MonkeyPatch) -> HeadAlone:
    made = HeadAlone()
    monkeypatch.setitem(methods.METHODS, "full", made)
    return made


def test_every_method_of_the_configuration_is_there_and_no_other() -> None:
    assert set(METHODS) == set(get_args(MethodSettings.model_fields["name"].annotation))
    assert method_of(validate({})) is METHODS["full"]


def test_a_run_trains_and_saves_what_its_method_says(
    head_alone: HeadAlone, run_config: MakeConfig, tmp_path: Path
) -> None:
    config = load_config(run_config(train__steps=2), [])
    train(config, locate(None, tmp_path / "run", config))
    hello = [e for e in read_events(tmp_path / "run/events.ndjson") if isinstance(e, ev.Hello)][-1]
    head = head_alone.after["lm_head.weight"]
    assert hello.trained_parameters == head.numel() < hello.parameters
    changed = {n for n, w in head_alone.after.items() if not torch.equal(w, head_alone.before[n])}
    assert changed == {"lm_head.weight"}
    (written,) = (tmp_path / "run/model").iterdir()
    assert torch.equal(load_file(written)["lm_head"], head)
