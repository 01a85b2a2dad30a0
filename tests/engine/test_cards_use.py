"""Evaluation and generation with the blocks of a model on several cards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fluxtrain.core.wrap import target
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.facts import Capacity
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.results import opened as use
from fluxtrain.results.generation_session import measure, rows_that_fit
from fluxtrain.results.model_request import ModelRequest
from tests.engine.test_generate import PROMPTS, tokens_of
from tests.engine.used_models import greedy, opened, plain
from tests.on_cards import llama

Folder = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("offload", ["max", "none"])
@pytest.mark.thinned(3)
def test_answers_are_those_of_transformers_alone(
    family: str, offload: str, model_folder: Folder
) -> None:
    folder = model_folder(family)
    with opened(folder, offload=offload, cards="2") as model:
        assert [sum(u.card == n for u in model.engine.units if u.group.kind == "block")
                for n in (0, 1)] == [1, 1]  # fmt: skip
        assert "2 parts of the CPU" in model.placed
        found = tokens_of(model, PROMPTS)
        assert rows_that_fit(model, measure(model), 20, 12) == 64
    alone = plain(folder)
    assert found == greedy(alone, PROMPTS, 12)


def _found(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], cards: str | None = None
) -> tuple[int, bool]:
    """How many cards of these sizes a model takes, and whether all of its blocks stay there."""
    model: nn.Module = llama(6)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    left = iter(range(10_000))
    devices = [CPU] * len(sizes)

    def free(_: Any, device: torch.device) -> Capacity:
        return Capacity(
            device_free_bytes=weights_bytes * sizes[next(left) % len(sizes)] // 100,
            host_available_bytes=None,
        )

    monkeypatch.setattr(target, "free_capacity", free)
    request = ModelRequest(named="demo", cards=cards)
    asked = RunRequest.of(PlacementRequest())
    facts = facts_of(model.requires_grad_(False), "fp32", "plain")
    placement, used = use._placed("demo", facts, model, devices, request, asked)
    blocks = use._blocks(placement)
    return len(used), all(map(use._stays, blocks))


def test_as_few_cards_are_taken_as_hold_the_model_and_all_where_none_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _found(monkeypatch, [400, 400, 400]) == (1, True)
    assert _found(monkeypatch, [140, 140, 140])[0] > 1
    assert _found(monkeypatch, [400, 400], cards="2") == (2, True)
    with pytest.raises(DoesNotFit, match="demo cannot be used here"):
        _found(monkeypatch, [1, 1])


@pytest.mark.parametrize("cards", ["0", "two", "1.5", "-1", "1,", "1,x", "", "9" * 5000])
def test_cards_that_cannot_be_are_refused(cards: str) -> None:
    with pytest.raises(BadInput, match="--cards"):
        ModelRequest(named="demo", cards=cards).check_values()
