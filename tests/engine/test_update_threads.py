"""Updates beside a GPU's computation leave a core to the threads that queue its work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.optim.stepping import threads_beside
from fluxtrain.stream import updates
from fluxtrain.stream.engine import engine_of


@pytest.mark.parametrize(("cores", "used"), [(2, None), (4, 3), (8, 7), (16, 14), (64, 56)])
def test_of_eight_cores_one_is_left(
    cores: int, used: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert threads_beside(torch.device("cuda")) == used
    assert threads_beside(torch.device("cpu")) is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Which update took how many threads, in an engine that has 3 of them beside a computation."""
    seen: list[tuple[str, int | None]] = []

    def watched(name: str) -> None:
        step = getattr(updates, name)

        def counted(*args: Any, **kwargs: Any) -> None:
            seen.append((name, kwargs.get("threads")))
            step(*args, **kwargs)

        monkeypatch.setattr(updates, name, counted)

    for name in ("step_on_host_", "step_weights_on_host_", "step_moments_on_host_"):
        watched(name)
    monkeypatch.setattr(updates, "threads_beside", lambda _: 3)
    return seen


def test_only_what_the_next_forward_waits_for_takes_all(
    tiny: Any, batch: Any, calls: list[tuple[str, int | None]]
) -> None:
    model = fluxtrain.wrap(tiny("llama"), offload="weights", deferred_moments=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch("llama")).loss.backward()
    optimizer.step()
    assert set(calls) == {("step_weights_on_host_", None), ("step_moments_on_host_", 3)}


def test_updates_under_the_backward_pass_leave_a_core(
    tiny: Any, batch: Any, calls: list[tuple[str, int | None]]
) -> None:
    model = fluxtrain.wrap(tiny("llama"), offload="weights")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch("llama")).loss.backward()
    optimizer.step()
    assert set(calls) == {("step_on_host_", None)}  # of a step that waits for the norm
    optimizer.zero_grad()
    calls.clear()
    engine_of(model).begin_eager_step(optimizer)
    model(**batch("llama")).loss.backward()
    optimizer.step()
    assert set(calls) == {("step_on_host_", 3)}
