"""Models that write to a mask, in their blocks or between them, on one card and on several."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.on_cards import wrapped

MODES: dict[str, Callable[[], Any]] = {
    "with gradients": contextlib.nullcontext,
    "without": torch.no_grad,
    "inference": torch.inference_mode,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, mask: Tensor, writes: bool) -> Tensor:
        if writes:
            mask.add_(1.0)
        return hidden + torch.tanh(self.linear(hidden)) * mask


class Stack(nn.Module):
    """Writes to a mask in every block, or between blocks."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.inside = inside

    def forward(self, values: Tensor) -> Tensor:
        hidden, mask = self.enter(values), torch.ones(len(values), 1)
        for block in self.blocks:
            hidden = block(hidden, mask, self.inside)
            if not self.inside:
                mask = mask.add_(1.0) if not torch.is_grad_enabled() else mask + 1.0
        return torch.cat([hidden, mask], 1)


def what_is_written_reaches_other_cards(*, inside: bool, mode: str, chunk_rows: int) -> None:
    """Compare outputs and gradients of one card with those of two and three."""
    plain = Stack(inside)
    found: list[list[Tensor]] = []
    for cards in (None, 2, 3):
        model = copy.deepcopy(plain)
        wrapped(model, cards, chunk_rows=chunk_rows)
        for _ in range(2):  # the first call finds out what is written to
            with MODES[mode]():
                out = model(torch.ones(8, 4))
        gradients: list[Tensor] = []
        if mode == "with gradients":
            out.square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([out.detach(), *gradients])
    torch.testing.assert_close(found[0][0], plain(torch.ones(8, 4)).detach())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
