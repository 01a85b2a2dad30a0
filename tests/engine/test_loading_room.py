"""Device memory that runs out while a model is loaded: it is loaded once more, planned anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fluxtrain.core.wrap import wrap as wrapping
from fluxtrain.events import events as ev
from fluxtrain.train import run as runs
from fluxtrain.train.placing.placing import RanOutLoading
from tests.engine.runs import MakeConfig, losses, run
from tests.engine.test_train_cards import SIZES

MESSAGE = "CUDA out of memory. Tried to allocate 1.00 GiB.\nAnd more."


def out_of_memory() -> None:
    raise torch.OutOfMemoryError(MESSAGE)


Raises = Callable[[], None]


def fails_at(
    monkeypatch: pytest.MonkeyPatch, *tries: int, how: Raises = out_of_memory
) -> list[weakref.ref[nn.Module]]:
    """Let wrapping run out of memory half way at these tries; return the models of all."""
    whole, models = wrapping._make_units, list[weakref.ref[nn.Module]]()

    def make_units(engine: Any, model: nn.Module, *rest: Any) -> None:
        gc.collect()
        assert all(one() is None for one in models)  # its memory is free for the next
        models.append(weakref.ref(model))
        if len(models) in tries:
            how()
        whole(engine, model, *rest)

    monkeypatch.setattr(wrapping, "_make_units", make_units)
    return models


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.thinned(1)
def test_a_run_whose_loading_ran_out_once_is_that_of_all_memory(
    method: str, run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = (f"method.name={method}",)
    whole = run(run_config(**SIZES), tmp_path / "whole", *how)
    models, planned = fails_at(monkeypatch, 1), list[int]()
    plan = runs.plan_run
    monkeypatch.setattr(runs, "plan_run", lambda *a, **k: planned.append(1) or plan(*a, **k))
    found = run(run_config(**SIZES), tmp_path / "run", *how)
    assert len(models) == 2 and len(planned) == 2
    assert losses(found) == losses(whole)
    told = warnings(found)
    assert sum("while the model was loaded (CUDA out of memory" in text for text in told) == 1
    assert not any("And more" in text for text in told)


def warnings(events: list[Any]) -> list[str]:
    return [e.text for e in events if isinstance(e, ev.LogWritten) and e.level == "warning"]


def test_a_second_time_ends_the_run(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = fails_at(monkeypatch, 1, 2)
    with pytest.raises(RanOutLoading, match="out of memory"):
        run(run_config(**SIZES), tmp_path / "run")
    assert len(models) == 2
