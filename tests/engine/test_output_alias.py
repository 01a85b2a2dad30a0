"""Outputs of a block that are its arguments or share memory, and callers that write to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.errors import MisusedModel
from tests.engine.argument_models import (
    LAYOUTS,
    Around,
    Inside,
    Model,
    adds_what_it_gave,
    as_the_plain_model,
    gives_a_view,
    gives_a_view_of_its_output,
    gives_overlapping_views,
    goes_on,
    nothing,
    passes,
    passes_on,
    passes_on_beside,
    same,
    writes_to_the_output,
    writes_to_the_output_and_reads_the_input,
)
from tests.wrap_with import wrap_with


@pytest.mark.thinned(20)
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
        passes_on,
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
        assert around is writes_to_the_output_and_reads_the_input  # the block's input is gone
        assert "was given as x was changed in place after its forward pass" in str(refused)


class Reverses(torch.autograd.Function):
    """Gives its input on, and turns its gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def reverses(block: Any, x: Tensor) -> Tensor:
    return Reverses.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside", [gives_a_view_of_its_output, gives_overlapping_views, reverses])
def test_outputs_that_share_memory_have_their_gradients(inside: Inside, layout: str) -> None:
    def around(block: nn.Module, x: Tensor) -> Tensor:
        out = block(x)
        y, view = out if isinstance(out, tuple) else (out, out)
        return x * 2 + view.mean() * 3 + nn.functional.pad(y, (0, 0, 6 - y.shape[1], 0))

    plain = Model(inside, around)
    wrapped = wrap_with(copy.deepcopy(plain), **LAYOUTS[layout])
    same(passes(wrapped, nothing), passes(plain, nothing), "rows")  # sums have another order


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
