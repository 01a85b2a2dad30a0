"""A block is computed again only as far as its backward pass needs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel
from tests.wrap_with import wrap_with

CHECKED_STEPS = 3  # recomputes that run to the end, to be compared with the forward


class Block(nn.Module):
    """A gated block whose last product nobody needs for the backward pass."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inside = nn.Linear(width, 2 * width)
        self.outside = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outside(nn.functional.silu(self.inside(self.norm(x))))


class Stack(nn.Module):
    """Three blocks of one kind."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 5, 16)


def gradients(model: nn.Module, passes: int = 1) -> dict[str, Tensor]:
    for _ in range(passes):
        model.zero_grad()
        model(rows()).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        off = float((gradient - other[name]).abs().max())
        assert off <= 1e-5 * float(other[name].abs().max()), name


def past_the_checks(model: nn.Module) -> None:
    for unit in engine_of(model).units:
        unit.checked_recomputes = CHECKED_STEPS


def test_the_last_product_is_computed_once_and_all_others_twice() -> None:
    model = fluxtrain.wrap(Stack())
    past_the_checks(model)
    ran: list[str] = []
    block = model.blocks[1]
    for name in ("norm", "inside", "outside"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    gradients(model)
    assert ran == ["norm", "inside", "outside", "norm", "inside"]


@pytest.mark.parametrize("chunk_rows", [4, 1])
def test_gradients_of_an_early_end_are_those_of_the_plain_model(chunk_rows: int) -> None:
    plain = Stack()
    model = fluxtrain.wrap(copy.deepcopy(plain), chunk_rows=chunk_rows)
    checked = gradients(model)
    past_the_checks(model)
    early = gradients(model)
    assert all(torch.equal(checked[name], early[name]) for name in checked)
    same(early, gradients(plain))


class Fickle(Block):
    less = False

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.less else super().forward(x)


def test_a_recompute_that_saves_less_is_refused() -> None:
    model = fluxtrain.wrap(Stack(Fickle))
    gradients(model)
    past_the_checks(model)
    loss = model(rows()).square().sum()
    for block in model.blocks:
        block.less = True
    with pytest.raises(MisusedModel, match="saved tensors"):
        loss.backward()


def test_kept_blocks_compute_nothing_again_and_give_the_same_bits() -> None:
    model = fluxtrain.wrap(Stack(), chunk_rows=2)
    wanted = gradients(model)
    ran: list[str] = []
    for unit in engine_of(model).units:
        unit.recomputes = False
    model.blocks[1].norm.register_forward_hook(lambda *_: ran.append("norm"))
    found = gradients(model)
    assert ran == ["norm", "norm"]  # one for each chunk
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_early_end_leaves_no_activation_behind() -> None:
    """The frames that it passed through are freed at once, not by the collector."""
    model = fluxtrain.wrap(Stack(), chunk_rows=2)
    past_the_checks(model)
    seen: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        block.inside.register_forward_hook(lambda _m, _a, out: seen.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        loss = model(rows()).square().sum()
        loss.backward()
        alive = [made for made in seen if made() is not None]
    finally:
        gc.enable()
    assert len(seen) > 6
    assert not alive


class StoresOnContext(torch.autograd.Function):
    """A product whose backward finds its input and a view of its weight on `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.turned = x, weight.t()
        return x @ ctx.turned  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.einsum("btj,bti->ji", gradient, ctx.x)
        return gradient @ ctx.turned.t(), weight


class Storing(Block):
    def forward(self, x: Tensor) -> Tensor:
        inside = StoresOnContext.apply(x, self.inside.weight)
        return x + self.outside(nn.functional.silu(inside))  # type: ignore[no-any-return]


class ItsOwnHooks(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().forward(x)


@pytest.mark.parametrize("block", [Storing, ItsOwnHooks])
def test_a_block_may_keep_views_of_its_weights_between_the_passes(block: type[Block]) -> None:
    """Another block's weights lie in the slot when the backward pass comes."""

    def after_an_evaluation(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(rows()).square().sum()
        with torch.no_grad():
            model(rows())
            model.blocks[0](rows())  # type: ignore[index,operator]
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = Stack(block)
    model = fluxtrain.wrap(copy.deepcopy(plain), offload="max")
    wanted = after_an_evaluation(plain)
    for _ in range(CHECKED_STEPS + 2):
        same(after_an_evaluation(model), wanted)


class ReturnsAWeight(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.outside.weight.t()


class Penalized(Stack):
    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for block in self.blocks:
            x, weight = block(x)
            weights.append(weight)
        return x + sum(weight.square().mean() for weight in weights)


def test_a_weight_that_a_block_returns_outlives_its_slot() -> None:
    plain = Penalized(ReturnsAWeight)
    model = fluxtrain.wrap(copy.deepcopy(plain), offload="max")
    same(gradients(model), gradients(plain))


class GradientInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        (slope,) = torch.autograd.grad(self.inside(y).square().sum(), y, create_graph=True)
        return super().forward(x) + 0.01 * slope


class FunctionalInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: self.inside(y).square().sum())(x)
        return super().forward(x) + 0.01 * slope


class UsesUp(torch.autograd.Function):
    """Has nothing left for a second backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factors = [1.0]
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        factor = ctx.factors.pop()
        (x,) = ctx.saved_tensors
        return gradient * x.exp() * factor  # type: ignore[no-any-return]


class UsedUp(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(UsesUp.apply(self.norm(x)))  # type: ignore[no-any-return]


class Compiled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(super().forward, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x)


@pytest.mark.parametrize("blocks_without_recompute", [0, 3])
@pytest.mark.parametrize("block", [GradientInside, FunctionalInside, UsedUp, Compiled])
@pytest.mark.thinned(4)
def test_a_block_whose_graph_cannot_be_filled_again_is_recorded_again(
    block: type[Block], blocks_without_recompute: int
) -> None:
    model = wrap_with(Stack(block), blocks_without_recompute=blocks_without_recompute)
    wanted = gradients(Stack(block))
    for _ in range(CHECKED_STEPS + 2):
        same(gradients(model), wanted)
    assert all(unit.records_again for unit in engine_of(model).units)


class Remembers(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last, self.inner = x, self.inside(x)
        return super().forward(x)


@pytest.mark.parametrize("blocks_without_recompute", [0, 3])
def test_an_inner_tensor_in_the_loss_is_refused_with_the_cure(
    blocks_without_recompute: int,
) -> None:
    model = wrap_with(Stack(Remembers), blocks_without_recompute=blocks_without_recompute)
    loss = model(rows()).sum()
    with pytest.raises(MisusedModel, match="return such tensors"):
        (loss + model.blocks[1].inner.sum()).backward()


class Aside(Block):
    side: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.side is None else super().forward(x) + self.side


def test_a_tensor_that_comes_in_beside_the_arguments_is_refused_if_it_needs_a_gradient() -> None:
    model = fluxtrain.wrap(Stack(Aside))
    model.blocks[1].side = torch.ones(16)
    gradients(model)
    other = fluxtrain.wrap(Stack(Aside))
    other.blocks[2].side = other.blocks[0](rows())
    with pytest.raises(MisusedModel, match="neither an argument nor a weight"):
        other(rows())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_blocks_of_known_models_end_early(family: str, tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny(family), offload="max")
    model(**batch()).loss.backward()
    assert not any(unit.records_again for unit in engine_of(model).units)
