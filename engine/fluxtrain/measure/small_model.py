"""Build and wrap a small model: the edges of a model and some copies of the middle block of each
list of blocks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fluxtrain
from fluxtrain.core.device.heap import trim_heap
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.errors import FluxTrainError
from fluxtrain.plan.facts import Offload

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

ALL_CHECKED = 3  # recomputes after which the engine stops comparing them with the forward pass


class NotCalibrated(FluxTrainError):
    """Raised with the reason when a block cannot be timed; the planner then uses what it knew."""


def middle_block(model: nn.Module) -> nn.Module:
    """Return the block that is timed for all: in some models the first and the last differ."""
    blocks = take_apart(model).blocks
    return blocks[len(blocks) // 2][1]


def make_small_model(
    model: nn.Module,
    copies: int,
    *,
    blocks: torch.device,
    edges: torch.device,
    every_list: bool = True,
) -> nn.Module:
    """Copy `model` with only `copies` copies of the middle block of each list as its blocks.

    The blocks are placed on the device `blocks`, all other modules on the device `edges`. Without
    `every_list` the lists that the model's middle block is not in are empty.
    """
    middle, lists = middle_block(model), dict[str, list[nn.Module]]()
    for name, block in take_apart(model).blocks:
        lists.setdefault(name.rpartition(".")[0], []).append(block)
    short: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for name, members in lists.items():
        listed, block = model.get_submodule(name), members[len(members) // 2]
        count = copies if every_list or any(one is middle for one in members) else 0
        copied = [copy.deepcopy(block, _on(blocks, block.parameters())) for _ in range(count)]
        kind = nn.Sequential(*copied) if isinstance(listed, nn.Sequential) else None
        short[id(listed)] = nn.ModuleList(copied) if kind is None else kind
        inside |= {id(parameter) for parameter in listed.parameters()}
    outside = (p for p in model.parameters() if id(p) not in inside)
    return copy.deepcopy(model, {**_on(edges, outside), **short})


def _on(device: torch.device, parameters: Iterable[nn.Parameter]) -> dict[int, Any]:
    """Make the memo with which `deepcopy` copies `parameters` to `device`, never twice in host
    memory."""
    return {
        id(p): nn.Parameter(p.detach().to(device, copy=True), requires_grad=p.requires_grad)
        for p in parameters
    }


@contextmanager
def wrapped(
    small: nn.Module, device: torch.device, offload: Offload, chunk_rows: int, **rest: Any
) -> Iterator[Engine]:
    """Wrap `small` for the length of the context and give its engine, which skips the checks of
    the first steps.

    rest: more arguments of `wrap`.
    """
    from fluxtrain.core.guards.wrap_checks import without_advice
    from fluxtrain.core.wrap.engine import engine_of

    how: dict[str, Any] = {"offload": offload, "chunk_rows": chunk_rows, "overlap": True, **rest}
    with without_advice():
        fluxtrain.wrap(small, device=device, cards=1, **how)
    engine = engine_of(small)
    try:
        for unit in engine.units:
            unit.checked_recomputes = ALL_CHECKED
        yield engine
    finally:
        fluxtrain.unwrap(small)


def free_memory(device: torch.device) -> None:
    """Free what a dropped small model held in caches: the plan counts free memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        release = getattr(torch._C, "_host_emptyCache", None)  # not every build has it
        if release is not None:  # activations offloaded to the host were page-locked
            release()
    trim_heap()
