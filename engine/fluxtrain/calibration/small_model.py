"""A small model of the same blocks and edges, to try on a machine what a training will do there."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fluxtrain
from fluxtrain.calibration.block_timing import NotCalibrated
from fluxtrain.plan.facts import Offload
from fluxtrain.wrapping.block_discovery import take_apart

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine

ALL_CHECKED = 3  # recomputes after which the engine stops to compare them with the forward


def middle_block(model: nn.Module) -> nn.Module:
    """The block that stands for all: the first and the last of some models are others."""
    blocks = take_apart(model).blocks
    return blocks[len(blocks) // 2][1]


def miniature(
    model: nn.Module, copies: int, *, blocks: torch.device, edges: torch.device
) -> nn.Module:
    """A copy of `model` with `copies` of its middle block on the device `blocks` in place of all of
    them, and what stands outside the blocks on `edges`. Raises NotCalibrated where it has blocks in
    several lists."""
    parts = take_apart(model)
    lists = {name.rpartition(".")[0] for name, _ in parts.blocks}
    if len(lists) != 1:
        raise NotCalibrated(f"its blocks stand in {len(lists)} lists")
    listed = model.get_submodule(lists.pop())
    block = middle_block(model)
    copied = [copy.deepcopy(block, _on(blocks, block.parameters())) for _ in range(copies)]
    short = nn.Sequential(*copied) if isinstance(listed, nn.Sequential) else nn.ModuleList(copied)
    inside = {id(parameter) for parameter in listed.parameters()}
    outside = (p for p in model.parameters() if id(p) not in inside)
    return copy.deepcopy(model, {**_on(edges, outside), id(listed): short})


def _on(device: torch.device, parameters: Iterable[nn.Parameter]) -> dict[int, Any]:
    """What `deepcopy` takes for these parameters: copies that never exist twice on the host."""
    return {
        id(p): nn.Parameter(p.detach().to(device, copy=True), requires_grad=p.requires_grad)
        for p in parameters
    }


@contextmanager
def wrapped(
    mini: nn.Module, device: torch.device, offload: Offload, chunk_rows: int, **rest: Any
) -> Iterator[Engine]:
    """The engine of `mini` inside, past the checks of its first steps; unwrapped afterwards.

    rest: more arguments of `wrap`.
    """
    from fluxtrain.wrapping.engine import engine_of

    fluxtrain.wrap(
        mini, device=device, offload=offload, chunk_rows=chunk_rows, overlap=True, **rest
    )
    engine = engine_of(mini)
    try:
        for unit in engine.units:
            unit.checked_recomputes = ALL_CHECKED
        yield engine
    finally:
        fluxtrain.unwrap(mini)
