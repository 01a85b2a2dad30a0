"""Blocks that write to their arguments in place, and callers that write to what blocks return."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.errors import MisusedModel

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "resident": {"offload": "none"},
    "kept": {"offload": "none", "kept_blocks": 3},
    "parked": {"offload": "max"},
    "rows": {"chunk_rows": 2},
    "parked rows": {"offload": "max", "chunk_rows": 2},
}
Inside = Callable[[nn.Module, Tensor], Any]  # what a block computes
Around = Callable[[nn.Module, Tensor], Tensor]  # what the model does with it


class Block(nn.Module):
    """A linear layer and a norm that compute `inside`."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.inside = inside

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inside(self, x, *args, **kwargs)


class Model(nn.Module):
    """Three blocks, called as `around` says."""

    def __init__(self, inside: Callable[..., Any], around: Around) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(3))
        self.around = around

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.around(block, x, *args, **kwargs)
        return x


def passes(model: nn.Module, arguments: Callable[[], Any], gradients: bool = True) -> list[Tensor]:
    """Output, arguments afterwards and gradients of two passes."""
    found: list[Tensor] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(5, 6, 8)
        args, kwargs = arguments()
        model.zero_grad()
        y = model(x, *args, **kwargs)
        found.append(y.detach().clone())
        if gradients:
            y.square().sum().backward()
            found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        found.extend(t.detach().clone() for t in (x, *given) if isinstance(t, Tensor))
    return found


def nothing() -> Any:
    return (), {}


def same(one: list[Tensor], other: list[Tensor], layout: str) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        if "rows" in layout:
            assert float((a - b).abs().max()) <= 1e-4 * max(1.0, float(b.abs().max()))
        else:
            assert torch.equal(a, b)


def as_the_plain_model(
    inside: Callable[..., Any], around: Around, layout: str, arguments: Any = nothing
) -> None:
    plain = Model(inside, around)
    wrapped = fluxtrain.wrap(copy.deepcopy(plain), **LAYOUTS[layout])
    same(passes(wrapped, arguments), passes(plain, arguments), layout)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            ours, theirs = passes(wrapped, arguments, False), passes(plain, arguments, False)
            same(ours, theirs, layout)


# -- what a block does to its own input ------------------------------------------------------------


def scales(block: Any, x: Tensor) -> Tensor:
    y = block.linear(block.norm(x * 1.0))
    x.mul_(0.9)
    return y * x


def adds_to_itself(block: Any, x: Tensor) -> Tensor:
    x += block.linear(block.norm(x * 1.0))
    return x


def writes_to_a_view(block: Any, x: Tensor) -> Tensor:
    x[:, :3].mul_(0.5)
    x.transpose(1, 2)[:, 0] += 1.0
    return block.linear(x)


def writes_without_gradients(block: Any, x: Tensor) -> Tensor:
    y = block.linear(x * 1.0)
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)
    return y


def rectifies(block: Any, x: Tensor) -> Tensor:
    return block.linear(nn.functional.relu(x, inplace=True))


def passes_on(block: Any, x: Tensor) -> Tensor:
    return x


def passes_on_a_view(block: Any, x: Tensor) -> Tensor:
    x += block.linear(block.norm(x * 1.0))
    return x.view(x.shape[0], -1)


def passes_on_beside(block: Any, x: Tensor) -> Any:
    return block.linear(x), x


def gives_a_view_of_its_output(block: Any, x: Tensor) -> Any:
    y = block.linear(x)
    return y, y[:, 0]


def gives_overlapping_views(block: Any, x: Tensor) -> Any:
    y = block.linear(x)
    return y[:, 1:], y[:, :-1]


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


# -- what the model does around it -----------------------------------------------------------------


def adds_what_it_gave(block: nn.Module, x: Tensor) -> Tensor:
    y = first(block(x))
    return x + y.view_as(x)


def goes_on(block: nn.Module, x: Tensor) -> Tensor:
    return first(block(x)).reshape(x.shape)


def writes_to_the_output(block: nn.Module, x: Tensor) -> Tensor:
    y = first(block(x * 1.0))
    y.mul_(2.0).add_(1.0)
    return y.view_as(x) * 1.0


def writes_to_the_output_and_reads_the_input(block: nn.Module, x: Tensor) -> Tensor:
    given = x * 1.0
    y = first(block(given))
    y.mul_(2.0)
    return given + y.view_as(x)


def gives_a_view(block: nn.Module, x: Tensor) -> Tensor:
    whole = torch.cat([x, x * 2], 1)
    y = first(block(whole[:, :6]))
    return y.reshape(x.shape) + whole[:, 6:] + whole[:, :6]


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


def test_a_write_that_another_argument_would_see_is_refused() -> None:
    def inside(block: Any, x: Tensor, part: Tensor) -> Tensor:
        x.mul_(0.5)
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


@dataclass
class Extra:
    """An argument that no tree of arguments looks into."""

    count: Tensor


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

    wrapped = fluxtrain.wrap(Model(lambda block, x: block.linear(x), around), **LAYOUTS[layout])
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
    wrapped = fluxtrain.wrap(copy.deepcopy(Model(inside, around)), **LAYOUTS[layout])
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
            passes(fluxtrain.wrap(copy.deepcopy(plain), **layout), nothing)
