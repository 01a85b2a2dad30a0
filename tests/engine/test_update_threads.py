"""Updates beside a GPU's computation leave a core to the threads that queue its work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain._native import Pass
from fluxtrain.core.adamw import kernels
from fluxtrain.core.adamw.kernels import update_threads
from fluxtrain.core.updates import updates


@pytest.mark.parametrize(("cores", "used"), [(2, None), (4, 3), (8, 7), (16, 14), (64, 56)])
def test_of_eight_cores_one_is_left(
    cores: int, used: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(kernels, "quota_cores", lambda: None)
    assert update_threads(torch.device("cuda")) == used
    assert update_threads(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("quota", "alone", "beside"), [(64, None, 14), (16, None, 14), (8, 8, 7), (3, 3, 3), (1, 1, 1)]
)
def test_no_more_threads_update_than_a_cpu_quota_keeps_running(
    quota: int, alone: int | None, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(kernels, "quota_cores", lambda: quota)
    assert update_threads(torch.device("cpu")) == alone
    assert update_threads(torch.device("cuda")) == beside


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pass, int | None]]:
    """Which update took how many threads, in an engine that has 3 of them beside a computation."""
    seen: list[tuple[Pass, int | None]] = []

    step = updates.step_

    def counted(*args: Any, **kwargs: Any) -> None:
        seen.append((kwargs["part"], kwargs["threads"]))
        step(*args, **kwargs)

    monkeypatch.setattr(updates, "step_", counted)
    monkeypatch.setattr(updates, "update_threads", lambda _: 3)
    return seen


def test_every_update_leaves_them(
    tiny: Any, batch: Any, calls: list[tuple[Pass, int | None]]
) -> None:
    deferred = {(Pass.WEIGHTS, 3), (Pass.MOMENTS, 3)}
    for defers, expected in ((True, deferred), (False, {(Pass.UPDATE, 3)})):
        calls.clear()
        model = fluxtrain.wrap(tiny("llama"), offload="weights", deferred_moments=defers)
        optimizer = torch.optim.AdamW(model.parameters())
        model(**batch("llama")).loss.backward()
        optimizer.step()
        assert set(calls) == expected
        fluxtrain.unwrap(model)
