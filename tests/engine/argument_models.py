"""Small models whose blocks write to arguments or return them, and the same without FluxTrain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.wrap_with import wrap_with

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "resident": {"offload": "none"},
    "kept": {"offload": "none", "blocks_without_recompute": 3},
    "offloaded": {"offload": "max"},
    "rows": {"chunk_rows": 2},
    "offloaded rows": {"offload": "max", "chunk_rows": 2},
}
Inside = Callable[[nn.Module, Tensor], Any]  # what a block computes
Around = Callable[..., Tensor]  # what the model does with it


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
    wrapped = wrap_with(copy.deepcopy(plain), **LAYOUTS[layout])
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


@dataclass
class Extra:
    """An argument that no tree of arguments looks into."""

    count: Tensor
