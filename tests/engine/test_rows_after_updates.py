"""A table by rows is updated first, and the next forward's lookup waits for that update."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.errors import Diverged
from tests.engine.deferred_models import GIVEN_UP_S
from tests.engine.row_models import by_rows, inputs, llama, wrapped


class Held:
    """The thread of the updates does nothing until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self._go = threading.Event()
        engine.updates._worker.submit(lambda: self._go.wait(GIVEN_UP_S))

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()


def stepped(model: nn.Module, engine: Engine, *, passes: int = 1, steps: int = 2) -> Any:
    """Some steps; the last one's optimizer step is left to the caller."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        for part in range(passes):
            model(**inputs(step * passes + part)).loss.backward()
        engine.clip_grad_norm(0.5)
        if step < steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def table_after(dtype: torch.dtype, **options: Any) -> Tensor:
    """The whole table after the same steps, without rows."""
    passes = options.pop("passes", 1)
    width = options.pop("hidden_size", 32)
    model = llama(dtype, hidden_size=width)
    engine = wrapped(model, "whole", **options)
    stepped(model, engine, passes=passes).step()
    engine.flush()
    weight: Tensor = model.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    return weight


CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "fp32": (torch.float32, {}),
    "several passes": (torch.bfloat16, {"passes": 2}),
    "moments later": (torch.bfloat16, {"deferred_moments": True}),
    "moments in bf16": (torch.bfloat16, {"states": "bf16"}),
    "moments in 8 bits": (torch.bfloat16, {"states": "8bit", "hidden_size": 256}),
    "blocks of moments that rows cut": (torch.bfloat16, {"states": "8bit", "hidden_size": 96}),
    "moments of fp32 in bf16": (torch.float32, {"states": "bf16"}),
    "moments of fp32 in 8 bits": (torch.float32, {"states": "8bit", "hidden_size": 256}),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("case", CASES)
def test_rows_wait_for_the_update_of_their_table(case: str) -> None:
    dtype, options = CASES[case]
    expected = table_after(dtype, **options)
    passes, width = options.pop("passes", 1), options.pop("hidden_size", 32)
    model = llama(dtype, hidden_size=width)
    engine = wrapped(model, "rows", **options)
    optimizer = stepped(model, engine, passes=passes)
    ids = inputs(9)["input_ids"]
    embed: Any = model.get_input_embeddings()  # type: ignore[operator]
    with Held(engine) as held:
        optimizer.step()
        optimizer.zero_grad()
        assert engine.groups[0].jobs.under_way
        timer = threading.Timer(0.1, held.__exit__)
        timer.start()
        found = embed(ids)
        timer.join()
    options.update(passes=passes, hidden_size=width)
    assert by_rows(engine)
    assert torch.equal(found, expected[ids])
    engine.flush()
    assert torch.equal(embed.weight.detach(), expected)


def test_a_step_that_is_refused_is_refused_in_the_forward() -> None:
    model = llama(torch.bfloat16)
    engine = wrapped(model, "rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(**inputs(0)).loss * float("nan")
    loss.backward()
    engine.clip_grad_norm(0.5)
    optimizer.step()
    with pytest.raises(Diverged):
        model(**inputs(1))
    assert by_rows(engine)
