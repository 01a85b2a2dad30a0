"""A small model for what becomes of its optimizer's state, wrapped and not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.wrap_with import wrap_with

Pair = tuple[nn.Module, torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Large enough for low-bit states, with a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for seed in range(start, stop):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 96, generator=draw).to(next(model.parameters()).dtype)
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(states: str = "fp32", dtype: torch.dtype = torch.float32, **options: Any) -> Pair:
    """A wrapped model and its optimizer after 20 steps."""
    model = wrap_with(net(dtype), device="cpu", offload="weights", states=states, **options)
    optimizer = adamw(model)
    train(model, optimizer, 0, 20)
    return model, optimizer
