"""Blocks that do what few do, and models of some of them that are called at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 8
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"offload": "none"},
    {"offload": "none", "blocks_without_recompute": 9},
    {"offload": "max", "overlap": True},
    {"chunk_rows": 2},
]


class Part(nn.Module):
    """A linear layer; what is computed with it is another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Blocks between two layers that are none."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Counts(Part):
    """A buffer that is written to, and computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.linear(x) * self.count.clone() * 0.1


class Averages(Part):
    """A buffer in whose place each forward puts another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x + y


class Normalised(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x.flatten(0, 1)).view_as(x))


class Drops(Part):
    """Leaves itself out by the numbers of Python, numpy and torch."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3 or np.random.uniform() < 0.3:
            return x
        return x + nn.functional.dropout(self.linear(x), 0.2, self.training) * random.random()


class LooksAhead(Part):
    """Computes with the gradient of a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            loss = self.linear(inner).square().sum()
            (slope,) = torch.autograd.grad(loss, inner, create_graph=True)
        return x + slope * 0.1


class Checkpointed(Part):
    def forward(self, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            return torch.sigmoid(self.linear(torch.sin(x)))

        return x + checkpoint(inside, x, use_reentrant=False)


class Hooked(Part):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda _, __, out: out * 1.5)
        self.linear.register_full_backward_hook(lambda _, found, __: (found[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        return x + y


class Complex(Part):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(WIDTH // 2, 2) * 0.3)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.view_as_complex(self.turns)).flatten(-2)
        return x + self.linear(turned[..., self.order])


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) * 0.1 for _ in range(3))
        self.named = nn.ParameterDict({"mix": nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)})
        self.one = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for scale in self.scales:
            y = y * (1 + scale)
        return x + self.one * (y @ self.named["mix"])


class Adapted(Part):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) + self.up(self.down(x))


class Reparametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.turn = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.turn(torch.tanh(self.new(x) + self.old(x)))


class Twice(Part):
    """One layer under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.linear
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + self.again(torch.relu_(self.linear(x)))


class Sparse(Part):
    def forward(self, x: Tensor) -> Tensor:
        mix = torch.eye(WIDTH).to_sparse()
        return x + torch.sparse.mm(mix, self.linear(x).flatten(0, 1).t()).t().view_as(x)


class Wide(Part):
    """Other dtypes inside, and a module of torch's that asks whether its inputs are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return (x.double().exp().log1p() + self.linear(x).double()).to(x.dtype)


PARTS: list[type[nn.Module]] = [
    Counts,
    Averages,
    Normalised,
    Drops,
    LooksAhead,
    Checkpointed,
    Hooked,
    Complex,
    Listed,
    Adapted,
    Reparametrised,
    Twice,
    Sparse,
    Wide,
]
DRAWING = {Drops, Twice}  # chunks draw other numbers than the whole


class Block(nn.Module):
    """Some parts, and one of the ways to return what they give."""

    def __init__(self, parts: list[type[nn.Module]], returned: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for part in parts)
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = part(x)
        return {
            "tensor": x,
            "tuple": (x, None, x.mean(-1)),
            "dict": {"x": x, "loss": x.square().mean(), "none": None},
            "list": [x, [x * 2, 3]],
            "same twice": (x, x),
            "detached": (x, x.detach()),
        }[self.returned]


class Random(nn.Module):
    """Two to four blocks of random parts, called in a random way that changes with the step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        self.returned = dice.choice(["tensor", "tuple", "dict", "list", "same twice", "detached"])
        self.called = dice.choice(["once", "shuffled", "left out", "twice", "cut", "checkpointed"])
        self.seed, self.forwards = seed, 0
        pool = [part for part in PARTS if part not in DRAWING or seed % len(LAYOUTS) != 4]
        if self.called == "checkpointed":  # which computes the plain model's parts twice
            pool = [part for part in pool if part not in (Counts, Averages, Normalised, LooksAhead)]
        count = dice.choice([1, 2, 3])
        self.blocks = nn.ModuleList(
            Block([dice.choice(pool) for _ in range(count)], self.returned)
            for _ in range(dice.choice([2, 3, 4]))
        )
        self.first = nn.Linear(WIDTH, WIDTH)
        if dice.random() < 0.2:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x, loss = self.first(x), torch.zeros(())
        for block in self._in_order():
            if self.called == "checkpointed":
                out = block_out = checkpoint(block, x, use_reentrant=False)
            elif self.called == "cut" and x.shape[0] > 1:
                halves = [_main(block(half)) for half in x.chunk(2)]
                out = block_out = torch.cat(halves)
            else:
                out = block_out = block(x)
            x = _main(out)
            if isinstance(block_out, dict):
                loss = loss + block_out["loss"]
        return x + 0.1 * loss

    def _in_order(self) -> Iterator[nn.Module]:
        dice = random.Random(self.seed + self.forwards)
        self.forwards += 1
        blocks = list(self.blocks)
        if self.called == "shuffled":
            dice.shuffle(blocks)
        for block in blocks:
            times = {"left out": dice.choice([0, 1]), "twice": dice.choice([1, 2])}
            for _ in range(times.get(self.called, 1)):
                yield block


def _main(out: Any) -> Tensor:
    first: Tensor = out["x"] if isinstance(out, dict) else out
    return first if isinstance(first, Tensor) else first[0]
