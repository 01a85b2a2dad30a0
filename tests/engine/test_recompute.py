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
from torch.utils.checkpoint import checkpoint

import fluxtrain
from fluxtrain.errors import MisusedModel
from fluxtrain.stream.engine import engine_of

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
        unit.checked = CHECKED_STEPS


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


class ReadsTwice(torch.autograd.Function):
    """Multiplies, and unpacks its saved tensors two times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y = ctx.saved_tensors[1]
        x = ctx.saved_tensors[0]
        return gradient * y, gradient * x


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + ReadsTwice.apply(x, self.norm(x))  # type: ignore[no-any-return]


def test_a_function_may_read_its_saved_tensors_twice() -> None:
    plain = Stack(Twice)
    model = fluxtrain.wrap(copy.deepcopy(plain), chunk_rows=2)
    wanted = gradients(plain)
    same(gradients(model), wanted)
    past_the_checks(model)
    same(gradients(model, passes=2), wanted)
    assert all(unit.reads_twice for unit in engine_of(model).units)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


def test_a_block_that_recomputes_by_itself_gives_the_same_gradients() -> None:
    plain = Stack(Checkpointed)
    model = fluxtrain.wrap(copy.deepcopy(plain))
    past_the_checks(model)
    same(gradients(model), gradients(plain))


class Careful(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:  # noqa: BLE001 - a block that goes on with something else
            return x


def test_a_block_that_catches_exceptions_does_not_catch_the_early_end() -> None:
    plain = Stack(Careful)
    model = fluxtrain.wrap(copy.deepcopy(plain))
    past_the_checks(model)
    same(gradients(model), gradients(plain))


def test_a_second_backward_over_one_graph_adds_the_same_gradients_again() -> None:
    model = fluxtrain.wrap(Stack())
    past_the_checks(model)
    loss = model(rows()).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


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


def test_the_graph_that_waits_holds_no_activation() -> None:
    model = fluxtrain.wrap(Stack())
    gradients(model)
    seen: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        block.inside.register_forward_hook(lambda _m, _a, out: seen.append(weakref.ref(out)))
    loss = model(rows()).square().sum()
    gc.collect()
    assert len(seen) == 3
    assert all(made() is None for made in seen)
    loss.backward()


def test_kept_blocks_compute_nothing_again_and_give_the_same_bits() -> None:
    model = fluxtrain.wrap(Stack(), chunk_rows=2)
    wanted = gradients(model)
    ran: list[str] = []
    for unit in engine_of(model).units:
        unit.keeps = True
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
