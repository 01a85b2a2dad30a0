"""Blocks that write to their arguments in place: followed for masks, refused for activations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.errors import MisusedModel
from tests.engine.argument_models import (
    LAYOUTS,
    Extra,
    Inside,
    Model,
    adds_to_itself,
    adds_what_it_gave,
    as_the_plain_model,
    nothing,
    passes,
    passes_on_a_view,
    rectifies,
    same,
    scales,
    writes_to_a_view,
    writes_without_gradients,
)
from tests.wrap_with import wrap_with


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "inside",
    [
        scales,
        adds_to_itself,
        writes_to_a_view,
        writes_without_gradients,
        rectifies,
        passes_on_a_view,
    ],
)
@pytest.mark.thinned(18)
def test_a_write_to_an_activation_is_refused_with_the_cure(inside: Inside, layout: str) -> None:
    plain = Model(inside, adds_what_it_gave)
    wrapped = wrap_with(copy.deepcopy(plain), **LAYOUTS[layout])
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote.*argument x.*x = x \+ 1.*\.clone"):
        passes(wrapped, nothing)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            same(passes(wrapped, nothing, False), passes(plain, nothing, False), layout)


# -- masks, as published models write to them ------------------------------------------------------


def mask_argument() -> Any:
    return (), {"mask": torch.ones(6, 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_without_gradients_may_be_written_to(layout: str) -> None:
    def inside(block: Any, x: Tensor, mask: Tensor) -> Tensor:
        mask.mul_(0.5)
        mask[2:] += 1
        return block.linear(x * mask.clone())

    as_the_plain_model(
        inside, lambda block, x, mask: x + block(x, mask=mask), layout, mask_argument
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_tensor_given_twice_is_one_inside(layout: str) -> None:
    def inside(block: Any, x: Tensor, mask: Tensor, *, again: Tensor) -> Tensor:
        mask.mul_(0.5)
        assert again is mask
        return block.linear(x * mask.clone()) + again

    def around(block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return block(x, mask, again=mask) + mask.clone()

    as_the_plain_model(inside, around, layout, mask_argument)


# -- writes that cannot be followed ----------------------------------------------------------------


def test_a_mask_that_becomes_differentiable_is_refused() -> None:
    def inside(block: Any, x: Tensor, mask: Tensor) -> Tensor:
        mask.add_(block.norm(x).mean((0, 1)))
        return block.linear(x * mask.clone())

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, mask: block(x, mask=mask)))
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote.*mask.*asks for gradients.*clone"):
        wrapped(torch.randn(5, 6, 8), torch.ones(6, 8))


def test_a_write_that_another_argument_would_see_is_refused() -> None:
    def inside(block: Any, x: Tensor, mask: Tensor, part: Tensor) -> Tensor:
        mask.mul_(0.5)
        return block.linear(x) + part

    def around(block: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(6, 8)
        return block(x, mask=mask, part=mask[:1])

    wrapped = fluxtrain.wrap(Model(inside, around))
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote in place to its argument mask.*clone"):
        wrapped(torch.randn(5, 6, 8))


def test_a_write_that_began_late_names_the_argument_and_the_cure() -> None:
    """What the argument was before is gone then, and the backward pass needs it."""
    late = False

    def inside(block: Any, x: Tensor, mask: Tensor) -> Tensor:
        if late:
            mask.mul_(0.5)
        return block.linear(x * mask)

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, mask: block(x, mask=mask)))
    mask = torch.ones(6, 8)
    wrapped(torch.randn(5, 6, 8), mask).sum().backward()
    late = True
    with pytest.raises(
        MisusedModel, match=r"wrote in place to its argument mask.*mask = mask \+ 1"
    ):
        wrapped(torch.randn(5, 6, 8), mask)


def test_a_write_to_a_tensor_inside_an_object_is_refused_by_its_type() -> None:
    def inside(block: Any, x: Tensor, extra: Extra) -> Tensor:
        extra.count.add_(1.0)
        return block.linear(x) * extra.count

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, extra: block(x, extra)))
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote in place.*type Extra.*tuples"):
        wrapped(torch.randn(5, 6, 8), Extra(torch.zeros(())))
    extra = Extra(torch.zeros(()))
    with torch.no_grad():
        wrapped(torch.randn(5, 6, 8), extra)
    assert float(extra.count) == 3


@pytest.mark.parametrize("change", ["append", "key"])
def test_a_list_or_dict_that_a_block_changes_is_refused(change: str) -> None:
    def inside(block: Any, x: Tensor, losses: list[Tensor], names: dict[str, Tensor]) -> Tensor:
        y = block.linear(x)
        if change == "append":
            losses.append(y.square().mean())
        else:
            names["last"] = y
        return y

    wrapped = fluxtrain.wrap(Model(inside, lambda block, x, *args: block(x, *args)))
    with pytest.raises(MisusedModel, match=r"blocks.0 changed a list or dict.*return"):
        wrapped(torch.randn(5, 6, 8), [], {"first": torch.ones(1)})


# -- after the forward pass ------------------------------------------------------------------------


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
    with pytest.raises(MisusedModel, match=r"computed something else.*\.data"):
        loss.backward()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_that_the_caller_changes_before_backward_is_refused_by_name(layout: str) -> None:
    def around(block: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        x += block(x)
        return x

    wrapped = wrap_with(Model(lambda block, x: block.linear(x), around), **LAYOUTS[layout])
    loss = wrapped(torch.randn(5, 6, 8)).sum()
    with pytest.raises(MisusedModel, match=r"blocks.2 was given as x was changed.*x = x \+ 1"):
        loss.backward()
