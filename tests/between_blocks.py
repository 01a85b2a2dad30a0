"""A model with a function between its blocks, for tests on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fluxtrain
from tests.on_cards import wrapped

ROWS, LENGTH, WIDTH, WORDS = 8, 6, 16, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """Four blocks, and a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = self.between(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Scaled(torch.autograd.Function):
    """Keeps its input, and gives it out as it is beside what it makes of it."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(given)
        return given, given.square() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (given,) = ctx.saved_tensors
        found: Tensor = gradients[0] + given * gradients[1] / 4
        return found


def watched(hidden: Tensor) -> Tensor:
    """Look at the values first, as a log of norms does."""
    with torch.no_grad():
        assert hidden.norm() > 0
    return hidden


def written(hidden: Tensor) -> Tensor:
    with torch.no_grad():
        hidden[:, 0].zero_()
    return hidden.mul_(1.5)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda hidden: hidden * 0.5 + hidden.tanh() * 0.5,
    "function": Same.apply,  # type: ignore[dict-item]
    "kept": lambda h: sum(Scaled.apply(h)),  # type: ignore[no-untyped-call,no-any-return]
    "vmap": torch.vmap(lambda row: row * 1),
    "reentrant": lambda h: checkpoint(torch.tanh, h, use_reentrant=True),  # type: ignore[no-any-return]
    "checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=False),  # type: ignore[no-any-return]
    "watched": watched,
    "written": written,
    "jvp": lambda h: torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[0],  # type: ignore[no-any-return]
}


def gradients(model: nn.Module, cards: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return the gradients of one batch on so many cards; 0: without FluxTrain."""
    words = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % WORDS
    if cards:
        wrapped(model, cards, device, chunk_rows=2)
    logits = model(words).flatten(0, 1)
    nn.functional.cross_entropy(logits, words.flatten().to(logits.device)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if cards:
        fluxtrain.unwrap(model)
    return found


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


class Dropping(Block):
    """Drops out inside of the block."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.3, self.training)


def with_dropout() -> Model:
    model = Model(lambda hidden: hidden)
    model.layers = nn.ModuleList(Dropping() for _ in range(4))
    return model


def drawn(cards: int, device: str, *, gradients: bool) -> Tensor:
    """Return what a model with dropout in its blocks computes, twice one after another."""
    model = with_dropout()
    wrapped(model, cards, device, chunk_rows=2)
    words = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % WORDS
    torch.manual_seed(5)
    with torch.set_grad_enabled(gradients):
        found = torch.stack([model(words).detach().cpu() for _ in range(2)])
    fluxtrain.unwrap(model)
    return found
