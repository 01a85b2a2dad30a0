"""Blocks that write to their arguments in place, and callers that write to what blocks return."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.errors import MisusedModel
from tests.engine.in_place_models import (
    LAYOUTS,
    Around,
    Extra,
    Inside,
    Model,
    adds_to_itself,
    adds_what_it_gave,
    as_the_plain_model,
    gives_a_view,
    gives_a_view_of_its_output,
    gives_overlapping_views,
    goes_on,
    nothing,
    passes,
    passes_on,
    passes_on_a_view,
    passes_on_beside,
    rectifies,
    same,
    scales,
    writes_to_a_view,
    writes_to_the_output,
    writes_to_the_output_and_reads_the_input,
    writes_without_gradients,
)
from tests.wrap_with import wrap_with


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "around",
    [
        adds_what_it_gave,
        goes_on,
        writes_to_the_output,
        writes_to_the_output_and_reads_the_input,
        gives_a_view,
    ],
)
@pytest.mark.parametrize(
    "inside",
    [
        scales,
        adds_to_itself,
        writes_to_a_view,
        writes_without_gradients,
        rectifies,
        passes_on,
        passes_on_a_view,
        passes_on_beside,
    ],
)
def test_a_write_is_seen_by_whom_it_concerns(inside: Inside, around: Around, layout: str) -> None:
    plain = Model(inside, around)
    try:
        passes(plain, nothing)
    except RuntimeError as error:  # torch refuses it too: so do we, or we compute it right
        assert "modified by an inplace operation" in str(error)
        return
    try:
        as_the_plain_model(inside, around, layout)
    except MisusedModel as refused:
        assert around is writes_to_the_output_and_reads_the_input  # the boundary is gone
        assert "was given as x was changed in place after its forward pass" in str(refused)


def test_most_of_that_is_computed_and_not_refused() -> None:
    for inside in (scales, adds_to_itself, passes_on, writes_to_a_view, passes_on_a_view):
        for around in (adds_what_it_gave, goes_on, gives_a_view):
            as_the_plain_model(inside, around, "whole")
    for inside in (adds_to_itself, passes_on_a_view, scales):
        as_the_plain_model(inside, writes_to_the_output_and_reads_the_input, "whole")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside", [gives_a_view_of_its_output, gives_overlapping_views])
def test_outputs_that_share_memory_go_on_sharing_it(inside: Inside, layout: str) -> None:
    def around(block: nn.Module, x: Tensor) -> Tensor:
        y, view = block(x)
        y.mul_(2.0)
        return x + view.mean(1, keepdim=True) * 3 + nn.functional.pad(y, (0, 0, 6 - y.shape[1], 0))

    def flat(block: nn.Module, x: Tensor) -> Tensor:
        y, view = block(x)
        y.mul_(2.0)
        return x + view[:, None] * 3 + y

    as_the_plain_model(inside, flat if inside is gives_a_view_of_its_output else around, layout)


# -- other arguments -------------------------------------------------------------------------------


def mask_argument() -> Any:
    return (), {"mask": torch.ones(6, 8)}


def nested_argument() -> Any:
    return ({"masks": (torch.ones(5, 1, 1), torch.arange(6.0)[:, None])},), {}


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
def test_nested_arguments_may_be_written_to(layout: str) -> None:
    def inside(block: Any, x: Tensor, extra: Any) -> Tensor:
        rows, places = extra["masks"]
        rows.add_(1.0)
        places.mul_(0.5)
        return block.linear(x * rows.clone() + places)

    as_the_plain_model(inside, lambda block, x, extra: x + block(x, extra), layout, nested_argument)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_becomes_differentiable_when_something_differentiable_is_written(
    layout: str,
) -> None:
    def inside(block: Any, x: Tensor, mask: Tensor) -> Tensor:
        mask.add_(block.norm(x).mean((0, 1)))
        return block.linear(x * mask.clone())

    def around(block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return block(x, mask=mask) * mask.clone()

    as_the_plain_model(inside, around, layout, mask_argument)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_tensor_given_twice_is_one_inside(layout: str) -> None:
    def inside(block: Any, x: Tensor, again: Tensor, *, third: Tensor) -> Tensor:
        x.mul_(0.5)
        assert again is x and third is x
        return block.linear(x) * again + third

    def around(block: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        return block(x, x, third=x) + x

    as_the_plain_model(inside, around, layout)


@pytest.mark.parametrize("counted", [True, False])  # by torch
def test_a_write_that_another_argument_would_see_is_refused(counted: bool) -> None:
    def inside(block: Any, x: Tensor, part: Tensor) -> Tensor:
        (x if counted else x.data).mul_(0.5)
        return block.linear(x) + part

    def around(block: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        return block(x, x[:, :1])

    wrapped = fluxtrain.wrap(Model(inside, around))
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote to its argument x in place.*clone"):
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
    with pytest.raises(MisusedModel, match=r"wrote to its argument mask.*mask = mask \+ 1"):
        wrapped(torch.randn(5, 6, 8), mask)


def test_a_late_write_to_an_argument_with_gradients_is_followed() -> None:
    late: list[bool] = []

    def inside(block: Any, x: Tensor) -> Tensor:
        if late:
            x.mul_(0.5)
        return block.linear(x * 1.0)

    plain = Model(inside, adds_what_it_gave)
    wrapped = fluxtrain.wrap(copy.deepcopy(plain))
    for late[:] in ([], [True], [], [True]):
        same(passes(wrapped, nothing), passes(plain, nothing), "whole")


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_output_that_is_changed_before_backward_is_right_or_refused(layout: str) -> None:
    """tanh computes its gradient with its output. torch refuses to, and kept activations must."""

    def around(block: nn.Module, x: Tensor) -> Tensor:
        return block(x).mul_(0.5)

    def apart(block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * 0.5

    def inside(block: Any, x: Tensor) -> Tensor:
        return torch.tanh(block.linear(x))

    plain = Model(inside, apart)
    wrapped = wrap_with(copy.deepcopy(Model(inside, around)), **LAYOUTS[layout])
    try:
        found = passes(wrapped, nothing)
    except MisusedModel as refused:
        assert layout == "kept" and "changed in place" in str(refused)
    else:
        assert layout != "kept"
        same(found, passes(plain, nothing), layout)


def test_a_block_that_spoils_what_it_saved_is_refused_as_torch_does() -> None:
    def inside(block: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(block.linear(x))
        y = h * 2.0
        h.add_(1.0)
        return block.norm(y + h)

    plain = Model(inside, goes_on)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passes(plain, nothing)
    for layout in LAYOUTS.values():
        with pytest.raises(MisusedModel, match="changed in place"):
            passes(wrap_with(copy.deepcopy(plain), **layout), nothing)
