"""`take_apart` sorts every parameter of a module tree into blocks, edges and the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.errors import UnsupportedModel


def tree(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def names(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    parts = take_apart(model)
    return [n for n, _ in parts.blocks], [n for n, _ in parts.edges], [n for n, _ in parts.loose]


def test_blocks_are_the_longest_lists_and_the_rest_are_edges() -> None:
    model = tree(
        embedding=nn.Embedding(9, 8),
        body=tree(layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), norm=nn.LayerNorm(8)),
        head=nn.Linear(8, 9),
    )
    model.body.scale = nn.Parameter(torch.ones(1))
    assert names(model) == (
        [f"body.layers.{i}" for i in range(4)],
        ["embedding", "body.norm", "head"],
        ["body.scale"],
    )


def test_every_parameter_is_in_exactly_one_part() -> None:
    model = tree(
        a=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(2, 2)] * 2))
                        for _ in range(2)),
        b=tree(c=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), d=nn.Linear(3, 3)),
        e=nn.BatchNorm1d(5),
    )  # fmt: skip
    parts = take_apart(model)
    held = [p for _, m in (*parts.blocks, *parts.edges) for p in m.parameters()]
    held += [p for _, p in parts.loose]
    assert len({id(p) for p in held}) == len(held) == len(list(model.parameters()))


def test_a_sequential_of_leaves_is_one_block_of_a_list_and_no_list_itself() -> None:
    def mlp() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    assert names(nn.Sequential(mlp(), nn.ReLU(), mlp()))[0] == ["0", "2"]
    with pytest.raises(UnsupportedModel, match="no repeated blocks"):
        take_apart(mlp())


def test_a_sequential_that_is_no_list_for_its_single_layers_is_named() -> None:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()) for _ in range(4)]
    edges = [nn.Flatten(), nn.Linear(12, 2)]
    with pytest.raises(UnsupportedModel, match=r"a Sequential of single layers .* does not count"):
        take_apart(nn.Sequential(nn.Conv2d(3, 3, 3), *blocks, *edges))
    assert len(names(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(*blocks), *edges))[0]) == 4


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.ReLU(), nn.ModuleList([nn.Linear(2, 2)]), tree(a=nn.Linear(2, 2))],
    ids=lambda m: type(m).__name__,
)
def test_a_model_without_repeated_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModel, match=type(model).__name__):
        take_apart(model)


def test_a_list_that_is_too_small_to_stream_is_named_with_its_share() -> None:
    model = tree(
        layers=nn.ModuleList(tree(a=nn.Linear(2, 2)) for _ in range(2)), b=nn.Linear(9, 99)
    )
    with pytest.raises(UnsupportedModel, match=r"layers, the largest.*48 B, less than 2%"):
        take_apart(model)
