"""A run whose head comes in vocabulary chunks: the numbers of one without, told in its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events import events as ev
from fluxtrain.plan import heads
from tests.engine.runs import run
from tests.engine.test_rows_run import numbers


@pytest.mark.parametrize("limit", ["0.5", "null"])
@pytest.mark.thinned(1)
def test_a_run_in_vocab_chunks_has_the_numbers_of_one_without(
    run_config: Callable[..., Path],
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 1)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 32)
    config = run_config(model__path=str(model_folder("llama")), train__steps=4)
    clip = f"train.max_grad_norm={limit}"
    found: dict[str, list[Any]] = {}
    for head in ("whole", "chunks"):
        found[head] = run(config, tmp_path / head, clip, f"placement.head={head}")
        planned = next(event for event in found[head] if isinstance(event, ev.Planned))
        told = next(choice for choice in planned.choices if choice.name == "placement.head")
        assert (told.value, told.because) == (head, "as set")
    whole, chunks = numbers(found["whole"]), numbers(found["chunks"])
    assert [loss for loss, _ in chunks] == pytest.approx([loss for loss, _ in whole], rel=1e-2)
    norms = [[norm for _, norm in each[:-1]] for each in (chunks, whole)]
    if limit != "null":
        assert norms[0] == pytest.approx(norms[1], rel=2e-2)
