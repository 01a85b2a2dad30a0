"""A small model with a language model's head, and losses over its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, LENGTH, WIDTH, WORDS = 3, 7, 16, 50


class Tower(nn.Module):
    """Two blocks and a language model's head, tied or with a bias."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        nn.init.normal_(self.head.weight)
        if tied:
            self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def batch(ignored: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids (B, T) and flat targets (B T,), the first `ignored` of which do not count."""
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, dims=1).reshape(-1).clone()
    targets[:ignored] = -100
    return ids, targets


def loss_and_gradients(
    model: Any, loss_of: Callable[[Any, Tensor], Tensor], ignored: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    ids, targets = batch(ignored)
    loss = loss_of(model(ids), targets)
    loss.backward()
    return loss.detach(), {
        n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None
    }


def agree(
    plain: Any, wrapped: Any, loss_of: Callable[[Any, Tensor], Tensor], *, ignored: int = 0,
    rtol: float = 1e-5,
) -> None:  # fmt: skip
    """The same loss, and gradients within `rtol` of their largest entry."""
    loss, gradients = loss_and_gradients(plain, loss_of, ignored)
    got, others = loss_and_gradients(wrapped, loss_of, ignored)
    torch.testing.assert_close(got.float(), loss.float(), rtol=rtol, atol=1e-6, equal_nan=True)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        limit = rtol * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(
            others[name].float(), gradient.float(), rtol=0.0, atol=limit, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def cross_entropy(**options: Any) -> Callable[[Any, Tensor], Tensor]:
    def loss(logits: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.view(-1, WORDS).float(), targets, **options)

    return loss


def beside(logits: Any, targets: Tensor) -> Tensor:
    """The fused loss plus terms that need the logits themselves."""
    flat = logits.view(-1, WORDS)
    loss = functional.cross_entropy(flat.float(), targets)
    return loss + 0.1 * logits.float().mean() + 1e-3 * flat.float().logsumexp(-1).square().mean()


SHAPES = {"untied": {}, "tied": {"tied": True}, "bias": {"bias": True}}
FUSED = {
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "ignore_index": lambda x, y: cross_entropy(ignore_index=5)(x, y.clamp(min=5)),
}
REAL = {
    "smoothed": cross_entropy(label_smoothing=0.1),
    "weighted": cross_entropy(weight=torch.linspace(0.5, 1.5, WORDS)),
    "each": lambda logits, y: cross_entropy(reduction="none")(logits, y).square().mean(),
    "beside": beside,
    "own": lambda logits, y: (
        -logits.float().log_softmax(-1).view(-1, WORDS)[torch.arange(len(y)), y.clamp(min=0)].mean()
    ),
}
