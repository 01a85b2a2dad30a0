"""A run whose embedding is looked up by rows: the same numbers, told in its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events import events as ev
from tests.engine.runs import run


def numbers(events: list[Any]) -> list[tuple[float, float | None]]:
    steps = [event for event in events if isinstance(event, ev.StepFinished)]
    assert steps
    evaluations = [e.loss for e in events if isinstance(e, ev.EvaluationFinished)]
    return [*((step.loss, step.grad_norm) for step in steps), (evaluations[-1], None)]


def embedding_of(events: list[Any]) -> ev.ChoiceMade:
    planned = next(event for event in events if isinstance(event, ev.Planned))
    return next(choice for choice in planned.choices if choice.name == "placement.embedding")


@pytest.mark.parametrize("limit", ["0.5", "null"])
@pytest.mark.thinned(1)
def test_a_run_by_rows_has_the_numbers_of_one_without(
    run_config: Callable[..., Path],
    model_folder: Callable[..., Path],
    tmp_path: Path,
    limit: str,
) -> None:
    config = run_config(model__path=str(model_folder("llama")), train__steps=4)
    clip = f"train.max_grad_norm={limit}"
    whole = run(config, tmp_path / "whole", clip, "placement.embedding=whole")
    rows = run(config, tmp_path / "rows", clip, "placement.embedding=rows")
    assert numbers(rows) == numbers(whole)
    assert (embedding_of(whole).value, embedding_of(rows).value) == ("whole", "rows")
    assert embedding_of(rows).because == "as set"
