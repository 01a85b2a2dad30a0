"""Optimizers of other packages over a model on the device: torch's stands in where none is here."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fluxtrain
from fluxtrain.cli import main
from fluxtrain.config.schema import validate
from fluxtrain.core.optimizer import third_party
from fluxtrain.core.optimizer.third_party import (
    THIRD_PARTY,
    ThirdParty,
    ThirdPartyOptimizer,
    check_third_party,
    third_party_optimizer,
)
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import EXIT_BAD_INPUT, BadInput, Interrupted, MisusedModel
from fluxtrain.events import events as ev
from fluxtrain.plan.states import THIRD_PARTY_FORMATS
from fluxtrain.train.loop import TrainingLoop
from tests.engine.runs import MakeConfig, run

NAME = "bnb-adamw-8bit"
HERE = [
    name
    for name, found in THIRD_PARTY.items()
    if importlib.util.find_spec(found.package) is not None and not found.needs_gpu
]
REAL = pytest.mark.parametrize(
    "name", HERE or [pytest.param(None, marks=pytest.mark.skip("neither package is installed"))]
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's AdamW under the name of another."""
    plain = ThirdParty(package="torch", module="torch.optim", name="AdamW", extra="none")
    monkeypatch.setitem(third_party.THIRD_PARTY, NAME, plain)


def made(model: nn.Module, **options: Any) -> ThirdPartyOptimizer:
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    return ThirdPartyOptimizer(
        engine_of(model), groups, lambda plain: torch.optim.AdamW(plain, lr=2e-3, **options)
    )


def steps_of(events: list[Any]) -> list[ev.StepFinished]:
    return [event for event in events if isinstance(event, ev.StepFinished)]


@pytest.mark.parametrize("passes", [1, 2])
def test_it_steps_the_weights_as_on_the_plain_model(
    passes: int, tiny: Any, batch: Any, weights: Any, close: Any
) -> None:
    plain, model = tiny("llama"), fluxtrain.wrap(tiny("llama"), offload="none", chunk_rows=2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=2e-3, weight_decay=0.1)
    ours, engine = made(model), engine_of(model)
    for step in range(5):
        for part in range(passes):
            (plain(**batch(seed=10 * step + part)).loss / passes).backward()
            (model(**batch(seed=10 * step + part)).loss / passes).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        engine.clip_grad_norm(0.5)
        ours.step()
        ours.zero_grad()
        assert model.lm_head.weight.grad is None
    close(weights(plain), weights(model), 1e-4)


def test_a_step_that_is_not_finite_changes_nothing(
    tiny: Any, batch: Any, weights: Any, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama"), offload="none")
    optimizer, before = made(model), weights(model)
    loss = model(**batch()).loss
    loss.backward()
    engine_of(model).clip_grad_norm(1.0, [loss * float("nan")])
    optimizer.step()
    same(before, weights(model))


def test_parts_on_the_host_are_refused(tiny: Any) -> None:
    with pytest.raises(MisusedModel, match="live on the host"):
        made(fluxtrain.wrap(tiny("llama"), offload="weights"))


def test_a_run_learns_and_a_stopped_one_goes_on_with_the_same_bits(
    run_config: MakeConfig, tmp_path: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__optimizer=NAME, train__steps=8, train__checkpoint_every=3)
    assert_resumes(config, tmp_path, monkeypatch)
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    assert plan["offload"] == "none"


def assert_resumes(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = steps_of(run(config, tmp_path / "whole"))
    assert whole[-1].loss < whole[0].loss
    between = TrainingLoop._between_steps

    def stop(self: TrainingLoop) -> None:
        between(self)
        if self.state.step == 4:
            self._requests.stop(130)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_between_steps", stop)
        with pytest.raises(Interrupted):
            run(config, tmp_path / "parts")
    torch.manual_seed(99)
    parts = steps_of(run(config, tmp_path / "parts", resume="auto"))
    assert [(s.loss, s.grad_norm) for s in parts] == [(s.loss, s.grad_norm) for s in whole]
    one, other = (
        load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_of_another_optimizer_is_refused(
    run_config: MakeConfig, tmp_path: Path, stand_in: None
) -> None:
    config = run_config(train__optimizer=NAME, train__checkpoint_every=2)
    run(config, tmp_path / "run")
    with pytest.raises(BadInput, match=r"train\.optimizer was 'bnb-adamw-8bit' and is 'adamw'"):
        run(config, tmp_path / "run", "train.optimizer=adamw", resume="auto")


# -- what is refused -------------------------------------------------------------------------------


def test_a_missing_package_ends_with_its_cure(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gone = replace(THIRD_PARTY[NAME], package="no_such_package")
    monkeypatch.setitem(third_party.THIRD_PARTY, NAME, gone)
    config = run_config(train__optimizer=NAME)
    for command in (("train", "--run-dir", str(tmp_path / "run")), ("plan",)):
        with pytest.raises(SystemExit) as ended:
            main([command[0], str(config), *command[1:]])
        assert ended.value.code == EXIT_BAD_INPUT
        assert "pip install 'fluxtrain[bitsandbytes]'" in capsys.readouterr().err


def test_paging_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(THIRD_PARTY["bnb-paged-adamw-8bit"], package="torch")
    monkeypatch.setitem(third_party.THIRD_PARTY, "bnb-paged-adamw-8bit", here)
    check_third_party("bnb-paged-adamw-8bit", "cuda")
    with pytest.raises(BadInput, match="needs a GPU"):
        check_third_party("bnb-paged-adamw-8bit", "cpu")


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [("placement", "offload", "weights"), ("train", "states", "8bit"), ("model", "dtype", "fp16")],
)
def test_what_does_not_go_together_is_refused_with_the_cure(
    section: str, setting: str, value: str
) -> None:
    raw: dict[str, Any] = {"train": {"optimizer": NAME}}
    raw.setdefault(section, {})[setting] = value
    with pytest.raises(BadInput, match=r"train\.optimizer = bnb-adamw-8bit"):
        validate(raw)


# -- the packages themselves, where they are installed ---------------------------------------------


@REAL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.thinned(1)
def test_a_run_with_the_real_optimizer_resumes_with_the_same_bits(
    name: str, dtype: str, run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        train__optimizer=name, train__steps=8, train__checkpoint_every=3, model__dtype=dtype,
        train__learning_rate=5e-3,
    )  # fmt: skip
    assert_resumes(config, tmp_path, monkeypatch)


@REAL
def test_the_real_states_take_what_the_plan_counts(name: str) -> None:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(3)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(layers)})
    planned = facts_of(model).without_masters(THIRD_PARTY_FORMATS[name])
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = third_party_optimizer(name, groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = sum(
        _bytes(value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() > 1 and "qmap" not in key
    )
    counted = sum(group.state_bytes for group in planned.groups)
    assert held == pytest.approx(counted, rel=0.01)


def _bytes(value: torch.Tensor) -> int:
    """Also of a tensor that is made of others."""
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return sum(getattr(value, name).nbytes for name in names if name != "qmap")
    return value.nbytes
