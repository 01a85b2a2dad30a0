"""What blocks write to their arguments in place, where copies run beside the computation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.wrap.engine import engine_of
from tests.gpu.numbers_of_cards import NUMBERS_OF_CARDS
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WIDTH, ROWS, TOKENS = 512, 16, 256
LAYOUTS: list[dict[str, Any]] = [
    {"offload": "none"},
    {"offload": "none", "blocks_without_recompute": 9},
    {"offload": "weights"},
    {"offload": "max"},
    {"offload": "max", "chunk_rows": 4},
]


class Fades(nn.Module):
    """Writes to a mask that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask.mul_(0.9)
        return x + self.linear(self.norm(x)) * mask.clone()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask_device = "cuda"
        self.mask = torch.ones(())
        self.blocks = nn.ModuleList(Fades() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        self.mask = torch.ones(ROWS, 1, WIDTH, device=self.mask_device)
        for block in self.blocks:
            y = block(x, self.mask)
            x = x * 0.5 + y * 0.5
        return x


def passes(model: Any, mask_device: str) -> list[Tensor]:
    """Losses, gradients and the mask of three passes."""
    model.mask_device = mask_device
    found: list[Tensor] = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, TOKENS, WIDTH, device="cuda", requires_grad=True)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad, model.mask]
        found += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found += [model(torch.ones(ROWS, TOKENS, WIDTH, device="cuda")), model.mask]
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("cards", NUMBERS_OF_CARDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mask_device", ["cuda", "cpu"])
def test_writes_to_arguments_are_those_of_the_plain_model(
    layout: dict[str, Any], mask_device: str, cards: int
) -> None:
    """A mask in host memory is copied to the device for each block, and what a block wrote to the
    copy is written to the mask."""
    plain = Stack()
    wrapped = wrap_with(copy.deepcopy(plain), device="cuda", cards=cards, **layout)
    for unit in engine_of(wrapped).units:
        assert unit.group.kind == "block"
    ours = passes(wrapped, mask_device)
    theirs = passes(plain.cuda(), "cuda")
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        off = float((one.double() - other.double()).norm())
        assert off <= 1e-4 * max(1e-6, float(other.double().norm()))
