"""Writes from outside: to what an embedding gave, to its weights, to their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.errors import MisusedModel
from tests.engine.row_models import (
    HIDDEN,
    VOCABULARY,
    Twice,
    by_rows,
    inputs,
    squares,
    wrapped,
)

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda found: found.add_(1.0),
    "mul": lambda found: found.mul_(3.0),
    "a part": lambda found: found[:, 0].fill_(2.0),
    "masked": lambda found: found.masked_fill_(torch.arange(10)[None, :, None] < 4, 0.5),
    "index": lambda found: found.__setitem__(torch.arange(40).view(4, 10) % 3 == 0, 0.25),
    "dropout": lambda found: nn.functional.dropout(found, 0.0, inplace=True),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_was_looked_up_may_be_written_to_in_place(kind: str) -> None:
    results = []
    for embedding in ("whole", "rows"):
        model = Twice()
        engine = wrapped(model, embedding)
        found = model.embed(inputs(0)["input_ids"])
        WRITES[kind](found)
        for layer in model.layers:
            found = torch.tanh(layer(found))
        found.square().mean().backward()
        assert by_rows(engine) == (embedding == "rows")
        results.append(model.embed.weight.grad.detach().clone())
    assert results[0].any()
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", WRITES)
def test_what_was_looked_up_without_gradients_may_be_written_to(kind: str) -> None:
    results = []
    for embedding in ("whole", "rows"):
        model = Twice()
        wrapped(model, embedding)
        ids = inputs(0)["input_ids"]
        with torch.no_grad():
            found = model.embed(ids)
        cut = model.embed(ids).detach()
        for one in (found, cut):
            WRITES[kind](one)
        results.append(torch.stack([found, cut]))
    assert torch.equal(*results)


def test_writes_to_the_weights_are_seen_by_the_next_forward() -> None:
    model = Twice()
    wrapped(model, "rows")
    ids = inputs(0)["input_ids"]
    model(ids)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not model.embed(ids).any()
    model.embed.weight.data = torch.ones(VOCABULARY, HIDDEN)
    assert model.embed(ids).eq(1).all()


def test_a_step_between_forward_and_backward_is_refused() -> None:
    model = Twice()
    wrapped(model, "rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    squares(model, 0).backward()
    loss = model.embed(inputs(1)["input_ids"]).square().sum()
    optimizer.step()
    with pytest.raises(MisusedModel, match="changed between forward and backward"):
        loss.backward()


def write_gradient(model: Any, kind: str) -> None:
    weight = model.embed.weight
    if kind == "in place":
        weight.grad.add_(1.0)
    elif kind == "given":
        weight.grad = torch.ones_like(weight)
    elif kind == "scaled":
        weight.grad.mul_(3.0)
    elif kind == "without a count":
        weight.grad.data.add_(1.0)
    elif kind == "numpy":
        weight.grad.numpy()[:] = 1.0
    else:
        weight.grad.copy_(torch.full_like(weight, torch.nan))


def once(model: nn.Module, seed: int) -> Tensor:
    """With one look into the embedding: its rows' gradients are put among zeros, and no more."""
    result: Tensor = model(inputs(seed)["input_ids"], again=False).square().mean()
    return result


@pytest.mark.parametrize("kind", ["in place", "given", "scaled", "nan", "without a count", "numpy"])
def test_what_was_written_to_a_gradient_is_gone_in_the_next_step(kind: str) -> None:
    results = []
    for embedding in ("whole", "rows"):
        model = Twice()
        wrapped(model, embedding)
        once(model, 0).backward()
        write_gradient(model, kind)
        found = [model.embed.weight.grad.detach().clone()]
        model.zero_grad()
        once(model, 1).backward()
        found.append(model.embed.weight.grad.detach().clone())
        results.append(found)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))


def test_what_is_written_to_a_gradient_that_was_kept_is_gone_in_the_next_step() -> None:
    results = []
    for embedding in ("whole", "rows"):
        model = Twice()
        engine = wrapped(model, embedding)
        once(model, 0).backward()
        kept = model.embed.weight.grad.data
        for step in (1, 2):
            model.zero_grad()
            once(model, step).backward()
            engine.cards[0].gradients.host.wait(engine.groups[0])
            kept.add_(1.0)
        model.zero_grad()
        once(model, 3).backward()
        results.append(model.embed.weight.grad.detach().clone())
    assert torch.equal(*results)


def test_other_optimizers_and_torch_clipping_see_the_whole_gradient() -> None:
    results = []
    for embedding in ("whole", "rows"):
        model = Twice()
        wrapped(model, embedding)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            squares(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.embed.weight.detach().clone())
    assert torch.equal(*results)
