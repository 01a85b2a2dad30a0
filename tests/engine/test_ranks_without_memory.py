"""Ranks that run out of device memory where they send meet the others, and send nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fluxtrain.core.ranks.exchange import Exchange, RanOutElsewhere
from fluxtrain.core.ranks.join import joined
from fluxtrain.plan.states import STATE_BLOCK
from tests.engine.ranks import together

WORLD, ELEMENTS = 3, 3 * STATE_BLOCK
MAKES = {"empty", "zeros", "clone", "new_zeros", "new_empty", "empty_like", "zeros_like"}


class Lacking(TorchDispatchMode):
    """Has no memory for the tensor of fp32 that is made as this number, from 0 on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in MAKES and found.dtype == torch.float32:
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return found


def gathered(exchange: Exchange) -> Tensor:
    assert exchange.shares is not None
    start = exchange.ranks.rank * STATE_BLOCK
    flat = torch.zeros(ELEMENTS)
    flat[start : start + STATE_BLOCK] = 1.0
    exchange.shares.gather(flat, 0)
    return flat


def added(exchange: Exchange) -> Tensor:
    flat = torch.full((ELEMENTS,), 1.0 / WORLD)
    exchange.reduce(flat)
    return flat


def rows(exchange: Exchange) -> Tensor:
    mine = torch.arange(exchange.ranks.rank + 1)
    every, values = exchange.gather_rows(mine, 1.0 / (WORLD - mine).view(-1, 1).expand(-1, 4))
    assert every.tolist() == [0, 1, 2]
    return values


def attempts(send: Callable[[Exchange], Tensor]) -> list[str]:
    """How sending ends where memory runs out at each place of it in turn, and then at none."""
    ranks = joined()
    exchange = Exchange(ranks, [torch.device("cpu")], sums=True, order="fixed", params="shard")
    exchange.agrees = True
    found: list[str] = []
    while not found or found[-1] != "sent":
        exchange._links[0].room = None
        try:
            with Lacking(len(found) if ranks.rank == 1 else 1 << 20):
                total = send(exchange)
            exchange.agree()
            assert total.allclose(torch.ones(()))
            found.append("sent")
        except torch.OutOfMemoryError:
            exchange.agree(ran_out=True)
            found.append("ran out")
        except RanOutElsewhere:
            found.append("ran out")
    exchange.close()
    return found


@pytest.mark.parametrize("send", [gathered, added, rows])
def test_what_runs_out_of_memory_is_sent_again(tmp_path: Path, send: Any) -> None:
    first, *others = together(WORLD, attempts, tmp_path, send)
    assert first[-1] == "sent" and len(first) > 1
    assert all(found == first for found in others)
