"""Device memory that runs out inside of a block: it is computed again with fewer rows at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of

ROWS, WIDTH = 8, 16


class Limit:
    """How many rows a block computes before memory runs out, and how often it ran out."""

    def __init__(self, forward: int = 99, backward: int = 99) -> None:
        self.forward, self.backward, self.ran_out = forward, backward, 0
        self.times = 99  # that memory runs out, at most

    def check(self, rows: int, most: int) -> None:
        if rows > most and self.ran_out < self.times:
            self.ran_out += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def limited(values: Tensor, limit: Limit) -> Tensor:
    found: Tensor = _Limited.apply(values, limit)  # type: ignore[no-untyped-call]
    return found


def limit_of(model: Any, block: int) -> Limit:
    found: Limit = model.blocks[block].limit
    return found


class _Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, limit: Limit) -> Tensor:
        ctx.limit = limit
        limit.check(len(values), limit.forward)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.limit.check(len(gradient), ctx.limit.backward)
        return gradient, None


class Block(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if how == "norm" else None
        self.how, self.limit = how, Limit()

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(values))
        if self.how == "dropout":
            hidden = nn.functional.dropout(hidden, 0.5, self.training)
        if self.norm is not None:
            values = self.norm(values)
        return values + limited(self.second(hidden), self.limit) * scale


class Stack(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.enter(values)
        for block in self.blocks:
            hidden = block(hidden, self.scale)
        mean: Tensor = hidden.square().mean()
        return mean


def values() -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(5))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(values()).backward()
    if hasattr(model, "_fluxtrain_engine"):
        engine_of(model).flush()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("chunk", [8, 4])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("how", [{}, {"blocks_without_recompute": 4, "resident_blocks": 4}],
                         ids=["recomputed", "kept"])  # fmt: skip
def test_gradients_are_those_of_all_memory(
    where: str, chunk: int, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack()
    wanted = gradients(copy.deepcopy(model))
    request = fluxtrain.PlacementRequest(**{"offload": "weights", **how})
    fluxtrain.wrap(model, device="cpu", chunk_rows=chunk, placement=request)
    limit = limit_of(model, 2)
    if where != "backward":
        limit.forward = 2
    if where != "forward":
        limit.backward = 1
    assert_close(gradients(model), wanted)
    assert limit.ran_out >= 1
    assert "device memory ran out in blocks.2 with" in caplog.text
    assert engine_of(model).chunk_rows == (chunk if where == "backward" else 2)


def test_without_gradients_too() -> None:
    model = Stack().eval()
    wanted = copy.deepcopy(model)(values())
    fluxtrain.wrap(model, device="cpu", chunk_rows=8)
    limit_of(model, 1).forward = 3
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(values()), wanted.detach())
    assert engine_of(model).chunk_rows == 2
    assert limit_of(model, 1).ran_out == 2, "8, then 4; later calls know"


def test_one_row_that_finds_no_room_raises_with_the_cure() -> None:
    model = Stack()
    fluxtrain.wrap(model, device="cpu", chunk_rows=8)
    limit_of(model, 1).forward = 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(values())
    assert "rows at once, and fewer are impossible" in caught.value.__notes__[0]
    limit_of(model, 1).forward = 99
    assert_close(gradients(model), gradients(Stack()))


@pytest.mark.parametrize(("how", "where"), [("norm", "forward"), ("norm", "backward"),
                                            ("dropout", "backward")])  # fmt: skip
def test_what_other_rows_would_change_is_not_computed_with_fewer(how: str, where: str) -> None:
    model = Stack(how)
    fluxtrain.wrap(model, device="cpu", chunk_rows=8)
    gradients(model)
    model.zero_grad()
    setattr(limit_of(model, 1), where, 4)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(model)


def test_a_block_with_dropout_draws_the_same_again() -> None:
    """Its forward has all random numbers that a run with such chunks has from its start."""
    found: list[dict[str, Tensor]] = []
    for chunk, most in ((8, 4), (4, 99)):
        model = Stack("dropout")
        fluxtrain.wrap(model, device="cpu", chunk_rows=chunk)
        limit_of(model, 0).forward = most
        torch.manual_seed(11)
        found.append(gradients(model))
    assert_close(*found)


class Writes(Block):
    """Writes to an argument, or to a buffer of its own, before memory runs out."""

    count: Tensor

    def __init__(self, place: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.place = place

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        if self.place == "argument":
            values.mul_(0.5)
        elif self.place == "buffer":
            self.count += 1
        return super().forward(values, scale) * (1 + self.count)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("to", ["argument", "buffer", "nothing"])
def test_what_a_block_wrote_before_memory_ran_out_is_not_written_twice(
    to: str, mode: Any, cards: int
) -> None:
    model = Stack()
    model.blocks = nn.ModuleList(Writes(to) for _ in range(4))
    wanted, again = copy.deepcopy(model), copy.deepcopy(model)
    fluxtrain.wrap(model, device="cpu", cards=cards, chunk_rows=8)
    limit = limit_of(model, 1)
    with mode():
        if to == "argument":
            limit.forward = 4
            with pytest.raises(torch.OutOfMemoryError) as caught:
                model(values())
            assert "offload='max'" in caught.value.__notes__[0]
            limit.forward = 99
        else:
            limit.forward, limit.times = 0, 1
        torch.testing.assert_close(model(values()), wanted(values()))
    if to == "nothing":
        assert_close(gradients(model), gradients(again))


@pytest.mark.parametrize(("how", "most"), [("", 0), ("dropout", 4)])
def test_a_backward_that_finds_no_room_names_the_cure_and_leaves_nothing(
    how: str, most: int
) -> None:
    model = Stack(how)
    fluxtrain.wrap(model, device="cpu", chunk_rows=8)
    limit_of(model, 1).backward = most
    with pytest.raises(torch.OutOfMemoryError) as caught:
        gradients(model)
    assert "blocks.1 ran out of device memory" in caught.value.__notes__[0]
    limit_of(model, 1).backward = 99
    model.zero_grad()
    if not how:
        assert_close(gradients(model), gradients(Stack()))


def test_a_trainer_that_redoes_steps_gets_the_error() -> None:
    model = Stack()
    fluxtrain.wrap(model, device="cpu", chunk_rows=8)
    engine_of(model).retries_blocks = False
    limit_of(model, 2).forward = 4
    with pytest.raises(torch.OutOfMemoryError):
        model(values())


def test_an_update_in_backward_goes_on_where_its_memory_ran_out() -> None:
    def trained(most: int) -> dict[str, Tensor]:
        model = Stack()
        fluxtrain.wrap(model, device="cpu", chunk_rows=8, optimizer_in_backward=True)
        engine = engine_of(model)
        engine.retries_blocks = False  # as in a trainer
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model(values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        limit_of(model, 1).backward = most
        loss = model(values())
        engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        optimizer.step()
        fluxtrain.sync(model)
        assert (limit_of(model, 1).ran_out > 0) == (most < ROWS)
        return {name: value.clone() for name, value in model.state_dict().items()}

    wanted, found = trained(99), trained(4)
    assert_close(found, wanted)
