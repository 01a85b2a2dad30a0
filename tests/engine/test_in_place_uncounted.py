"""Blocks that write to their arguments past torch's count of writes, and ever other arguments."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.errors import MisusedModel
from fluxtrain.stream.arguments import flatten
from fluxtrain.stream.in_place import KNOWN_STRUCTURES, Habits
from tests.engine.in_place_models import (
    LAYOUTS,
    Extra,
    Model,
    adds_what_it_gave,
    as_the_plain_model,
    passes,
    same,
)
from tests.wrap_with import wrap_with

Writes = Callable[[Tensor, Tensor], None]


def through_data(memory: Tensor, values: Tensor) -> None:
    memory.data[:] = values.detach()


def adds_through_data(memory: Tensor, values: Tensor) -> None:
    memory.data.add_(values.detach())


def through_numpy(memory: Tensor, values: Tensor) -> None:
    memory.detach().numpy()[...] = values.detach().numpy()


def writes_not_a_number(memory: Tensor, values: Tensor) -> None:
    memory.data.copy_(torch.where(values > 0, values, torch.nan).detach())


WRITES = [through_data, adds_through_data, through_numpy, writes_not_a_number]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_torch_does_not_count_is_seen_from_the_first_call(
    write: Writes, layout: str
) -> None:
    def inside(block: Any, x: Tensor, memory: Tensor) -> Tensor:
        y = torch.tanh(block.linear(x))
        write(memory, y)
        return x + y

    def around(block: nn.Module, x: Tensor) -> Tensor:
        memory = torch.zeros_like(x)
        y: Tensor = block(x, memory)
        return y + memory.nan_to_num(0.3)

    as_the_plain_model(inside, around, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", [adds_through_data, through_numpy])
def test_a_block_computes_with_what_it_wrote_past_the_count(write: Writes, layout: str) -> None:
    def inside(block: Any, x: Tensor, memory: Tensor) -> Tensor:
        write(memory, block.norm(x))
        return block.linear(x * memory.clone())

    def around(block: nn.Module, x: Tensor) -> Tensor:
        memory = torch.ones_like(x)
        y: Tensor = block(x, memory)
        return y + memory

    as_the_plain_model(inside, around, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_with_gradients_is_written_to_past_the_count(layout: str) -> None:
    """At the end, after what autograd saved: its gradients are those of the plain model too."""

    def inside(block: Any, x: Tensor) -> Tensor:
        y = block.linear(x)
        x.data.mul_(0.9)
        return torch.tanh(y)

    def around(block: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        return x + block(x)

    plain = Model(inside, around)
    wrapped = wrap_with(copy.deepcopy(plain), **LAYOUTS[layout])
    for _ in range(3):  # past the steps in which what is computed again is compared
        same(passes(wrapped, lambda: ((), {})), passes(plain, lambda: ((), {})), layout)


def test_a_leaf_with_gradients_may_be_written_to_past_the_count() -> None:
    def inside(block: Any, x: Tensor, scale: Tensor) -> Tensor:
        scale.data.mul_(0.5)
        return block.linear(x * scale)

    plain = Model(inside, lambda block, x, scale: block(x, scale))
    wrapped = fluxtrain.wrap(copy.deepcopy(plain))
    found = []
    for model in (plain, wrapped):
        scale = nn.Parameter(torch.full((8,), 3.0))
        model(torch.ones(5, 6, 8), scale).square().sum().backward()
        assert scale.grad is not None
        found.append((scale.detach(), scale.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert float(found[0][0][0]) == 3.0 * 0.5**3


@pytest.mark.parametrize("value", [float("nan"), -0.0, 1 + 2j, True, 7])
def test_what_no_block_writes_to_is_left_alone(value: Any) -> None:
    def inside(block: Any, x: Tensor, extra: Tensor) -> Tensor:
        return block.linear(x) + 0 * extra.shape[0]

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, extra: block(x, extra)))
    extra = torch.full((5, 3), value).t()
    for _ in range(2):
        wrapped(torch.randn(5, 6, 8), extra).sum().backward()
    assert extra._version == 0


def test_an_uncounted_write_to_a_tensor_inside_an_object_is_refused() -> None:
    def inside(block: Any, x: Tensor, extra: Extra) -> Tensor:
        extra.count.data.add_(1.0)
        return block.linear(x) * extra.count

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, extra: block(x, extra)))
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote in place.*type Extra.*tuples"):
        wrapped(torch.randn(5, 6, 8), Extra(torch.zeros(())))


def test_a_buffer_that_is_an_argument_too_keeps_what_the_block_writes_to_it() -> None:
    def inside(block: Any, x: Tensor, count: Tensor) -> Tensor:
        with torch.no_grad():
            block.count += 1.0
        return block.linear(x) + 0 * len(count)

    model = Model(inside, lambda block, x: block(x, block.count))
    for block in model.blocks:
        block.register_buffer("count", torch.zeros(2))
    wrapped = fluxtrain.wrap(model)
    wrapped(torch.randn(5, 6, 8))
    assert all(torch.equal(block.count, torch.ones(2)) for block in model.blocks)


@pytest.mark.parametrize("who", ["block", "caller"])
def test_a_late_uncounted_write_is_called_what_it_is(who: str) -> None:
    late = False

    def inside(block: Any, x: Tensor, scale: Tensor) -> Tensor:
        if late and who == "block":
            scale.data.add_(1.0)
        return block.linear(x * scale)

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, scale: block(x, scale=scale)))
    scale = torch.ones(5, 6, 8)
    wrapped(torch.randn(5, 6, 8), scale).sum().backward()
    late = True
    loss = wrapped(torch.randn(5, 6, 8), scale).sum()
    scale.data.add_(float(who == "caller"))
    with pytest.raises(MisusedModel, match=r"argument scale was written to.*\.data.*scale \+ 1"):
        loss.backward()


# -- arguments of ever other structure -------------------------------------------------------------


def test_only_the_last_structures_of_arguments_are_known() -> None:
    habits, always = Habits(), flatten(((torch.ones(1),), {}))[0]
    trees = [flatten((({str(i): torch.ones(1)},), {}))[0] for i in range(3 * KNOWN_STRUCTURES)]
    habits.learn(True, always, frozenset({0}))
    forgot = []
    for i, tree in enumerate(trees):
        forgot.append(habits.learn(True, tree, frozenset({i})))
        assert habits.of(True, tree) == {i}
        assert habits.of(True, always) == {0}
    assert forgot.index(True) == KNOWN_STRUCTURES - 1
    assert all(forgot[KNOWN_STRUCTURES - 1 :])
    known = [i for i, tree in enumerate(trees) if habits.of(True, tree) is not None]
    assert known == list(range(len(trees)))[1 - KNOWN_STRUCTURES :]


def test_ever_other_arguments_are_written_to_as_in_the_plain_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps: list[int] = []

    def inside(block: Any, x: Tensor, extra: dict[str, Any]) -> Tensor:
        x.mul_(0.5)
        extra["mask"].data.add_(1.0)
        return block.linear(x * extra["mask"])

    def around(block: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        return (
            adds_what_it_gave(lambda x: block(x, {"mask": mask, str(len(steps)): 1}), x * 1.0)
            + mask
        )

    plain = Model(inside, around)
    wrapped = fluxtrain.wrap(copy.deepcopy(plain))
    with caplog.at_level(logging.WARNING):
        while len(steps) < KNOWN_STRUCTURES + 5:
            steps.append(1)
            same(passes(wrapped, lambda: ((), {})), passes(plain, lambda: ((), {})), "whole")
    assert caplog.text.count("arguments of ever other structure") == 1
