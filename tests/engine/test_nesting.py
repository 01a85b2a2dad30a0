"""Structures are taken apart and put together as torch's pytree does it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from fluxtrain.core.guards.arguments import flatten, put_together, take_apart
from fluxtrain.core.memory.module_buffers import WrittenBuffers

Pair = namedtuple("Pair", "one other")  # what users write
X, Y = torch.ones(2), nn.Parameter(torch.zeros(3))


@dataclass
class Opaque:
    held: torch.Tensor


VALUES: list[Any] = [
    X,
    None,
    (),
    {},
    ((X,), {"mask": None, "pair": (Y, X), "flag": True, "names": ["a", 1.5, [X]]}),
    [X, (Y, [X, {}])],
    {"b": X, "a": Y},
    {True: X},
    {1: X},
    Pair(X, (Y,)),
    (OrderedDict(b=X, a=Y), {"c": X}),
    BaseModelOutput(last_hidden_state=X),
    {"out": BaseModelOutput(last_hidden_state=X, hidden_states=(X, Y))},
    (Opaque(X), X),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_structure_is_taken_apart_as_pytree_does_it(value: Any) -> None:
    for _ in range(2):  # the second time its structure is known
        leaves, spec, shape = take_apart(value)
        theirs, their_spec = pytree.tree_flatten(value)
        assert len(leaves) == len(theirs)
        assert all(mine is other for mine, other in zip(leaves, theirs, strict=True))
        assert spec == their_spec
        fresh = [torch.full((1,), float(i)) for i in range(len(leaves))]
        mine, other = put_together(fresh, spec, shape), pytree.tree_unflatten(fresh, spec)
        assert repr(mine) == repr(other)
        assert type(mine) is type(other)


def test_a_tensor_in_two_places_is_taken_out_once() -> None:
    tree, tensors = flatten(((X, Y, X), {"again": Y}), once=True)
    assert [t is s for t, s in zip(tensors, (X, Y), strict=True)] == [True, True]
    other = torch.ones(2)
    (first, second, third), keywords = tree.fill([other, Y])
    assert first is other and third is other and second is Y and keywords["again"] is Y
    assert len(flatten(((X, Y, X), {"again": Y}))[1]) == 4


class Lazy(nn.Module):
    """Has no buffer at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def forward(written: WrittenBuffers, block: nn.Module) -> list[int]:
    """Positions of the buffers that it is known to change, from a forward that changes all."""
    before = written.before(block)
    for buffer in block.buffers():
        buffer.add_(1)
    return sorted(written.after(block, before))


def test_a_module_with_buffers_that_replaces_one_without_is_noticed() -> None:
    block, written = Lazy(), WrittenBuffers()
    assert forward(written, block) == []
    block.inner[0] = nn.BatchNorm1d(2)
    assert forward(written, block) == [0, 1, 2]
