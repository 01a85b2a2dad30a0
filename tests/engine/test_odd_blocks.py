"""Blocks that do what few do, alone and in random models: the results are the plain model's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fluxtrain
from fluxtrain.errors import MisusedModel, UnsupportedModel
from tests.engine.odd_models import (
    DRAWING,
    LAYOUTS,
    PARTS,
    WIDTH,
    LooksAhead,
    Part,
    Random,
    Stack,
    Twice,
)
from tests.wrap_with import wrap_with


def trained(model: nn.Module, steps: int = 3, passes: int = 2) -> dict[str, Tensor]:
    """Losses, gradients, weights and buffers of clipped AdamW steps, and a result in eval mode.

    eps is large, so that noise in a gradient that is zero moves no weight.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0)
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        for part in range(passes):
            loss = model(torch.randn(4, 5, WIDTH)).square().mean()
            loss.backward()
            found[f"{step} loss {part}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{step} gradient {name}"] = parameter.grad.detach().clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        found["eval"] = model.eval()(torch.randn(3, 5, WIDTH))
    return found


def as_the_plain_model(make: Callable[[], nn.Module], layout: dict[str, Any]) -> None:
    """Within what other orders of summation and another computation of the norm make."""
    found = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        model = make()
        found.append(trained(wrap_with(model, **layout) if wrapped else model))
    plain, ours = found
    assert plain.keys() == ours.keys()
    for name, expected in plain.items():
        off = float((ours[name].double() - expected.double()).norm())
        assert off <= 1e-5 * max(1e-2, float(expected.double().norm())), f"{name}: {off:.2e}"
        if name.startswith("0 loss") and "chunk_rows" not in layout:
            assert torch.equal(ours[name], expected)


# -- parts of blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
@pytest.mark.thinned(12)
def test_each_part_alone(part: type[nn.Module], layout: dict[str, Any]) -> None:
    layout = {} if part in DRAWING and "chunk_rows" in layout else layout
    as_the_plain_model(lambda: Stack(part(), part(), part()), layout)


# -- random models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.thinned(8)
def test_random_models_train_as_without_fluxtrain(seed: int) -> None:
    as_the_plain_model(lambda: Random(seed), LAYOUTS[seed % len(LAYOUTS)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_embedding_with_a_largest_norm_shortens_its_rows_at_home(layout: dict[str, Any]) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, WIDTH, max_norm=0.5)
            self.blocks = nn.ModuleList(Twice() for _ in range(2))
            self.blocks.eval()

        def forward(self, x: Tensor) -> Tensor:
            x = self.table((x[..., 0].abs() * 9).long() % 16)
            for block in self.blocks:
                x = block.eval()(x)
            return x

    as_the_plain_model(Looks, layout)
    if layout.get("offload") == "none":
        return
    for dtype in (torch.bfloat16, torch.float16):
        model = wrap_with(Looks().to(dtype), **layout)
        model(torch.zeros(4, 5, WIDTH)).float().sum().backward()
        torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0).step()
        norms = model.table.weight.detach().float().norm(dim=1)
        assert float(norms[0]) == pytest.approx(0.5, rel=1e-2)  # also by its master
        assert float(norms[1:].max()) > 0.5


# -- what is refused -------------------------------------------------------------------------------


class Clamps(Part):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


class Replaces(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = nn.functional.normalize(self.linear.weight.data, dim=1)
        return self.linear(x)


@pytest.mark.parametrize("offload", ["none", "weights"])
@pytest.mark.parametrize("part", [Clamps, Replaces])
def test_a_weight_that_a_forward_writes_to_is_refused_by_name(
    part: type[nn.Module], offload: str
) -> None:
    """In a slot the write would be lost, and computing the block again would write twice."""
    model = fluxtrain.wrap(Stack(part(), part(), part()), offload=offload)
    x = torch.randn(4, 5, WIDTH)
    with pytest.raises(MisusedModel, match=r"blocks.0 wrote to its weight linear.weight"):
        model(x)
    with torch.no_grad(), pytest.raises(MisusedModel, match="after optimizer.step"):
        model(x)


def test_complex_weights_are_refused_with_a_cure_that_keeps_their_imaginary_part() -> None:
    class Turned(Part):
        def __init__(self) -> None:
            super().__init__()
            self.turns = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat))

    with pytest.raises(UnsupportedModel, match="complex64.*view_as_real"):
        fluxtrain.wrap(Stack(Turned(), Turned()))


def test_a_block_that_runs_inside_of_itself_is_refused() -> None:
    class Around(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = fluxtrain.wrap(Around(LooksAhead(), LooksAhead()))
    with pytest.raises(MisusedModel, match=r"blocks.0 was called inside.*leave the checkpoint out"):
        model(torch.randn(4, 5, WIDTH)).sum().backward()
