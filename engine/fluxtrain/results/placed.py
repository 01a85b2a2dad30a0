"""Places a model that is not trained: weights alone, no gradients and no optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.core.wrap.target import placed
from fluxtrain.core.wrap.wrap import Keeping, wrap_placed
from fluxtrain.errors import DoesNotFit
from fluxtrain.machine.machine import read_machine
from fluxtrain.models.copies import Copied
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.plan.states import StorageFormat
from fluxtrain.train.placing.cards import hold_to_budget
from fluxtrain.train.placing.placing import capacity_of, packed_cache
from fluxtrain.units import GIB, bytes_text

if TYPE_CHECKING:
    from fluxtrain.results.model_request import ModelRequest


def place_for_use(
    loaded: LoadedModel,
    devices: Sequence[torch.device],
    storage: StorageFormat,
    request: ModelRequest,
    tell: Callable[[str], None],
) -> tuple[Engine, str]:
    """Stream a loaded model through `devices`, the fewest that hold it, or all; return its engine,
    and its places in words.

    Half of a device's memory is left for the cache of keys and values and for activations.
    Raises DoesNotFit where neither the devices nor the host have room.
    """
    on_gpus = devices[0].type == "cuda"
    others = [device.index for device in devices[1:]]
    budget_bytes = hold_to_budget(request.budget_gib, others) if on_gpus else None
    facts = facts_of(loaded.model, "fp32", storage)
    asked = _asked(request, budget_bytes)
    placement, used = _placed(loaded.name, facts, loaded.model, devices, request, asked)
    keeping: Keeping | None = None
    if storage != "plain" and loaded.weight_files:
        keeping = partial(packed_cache, loaded, storage, tell)
    how: dict[str, Any] = {"states": "fp32", "frozen": storage, "keeping": keeping}
    if len(used) > 1:
        how["cards"] = [one.index for one in used] if on_gpus else range(len(used))
    wrap_placed(loaded.model, devices[0].type if "cards" in how else str(used[0]), placement, **how)
    return engine_of(loaded.model), _in_words(placement, used)


def refuse_before_loading(
    request: ModelRequest,
    devices: Sequence[torch.device],
    storage: StorageFormat,
    name: str,
    empty: nn.Module,
    copied: Copied,
) -> None:
    """Raise DoesNotFit, from a model without its weights, where they cannot be read or placed."""
    empty.requires_grad_(False)
    needed = copied.weights_bytes + copied.sources_bytes
    there = capacity_of(read_machine(), devices[0].type).host_available_bytes
    if there is not None and needed > there:
        raise DoesNotFit(
            f"{name} cannot be used here: reading it in another dtype than its files' makes copies "
            f"of {bytes_text(needed)}, and {bytes_text(there)} of host memory are free: leave "
            "--dtype out, or close other programs"
        )
    facts = facts_of(empty, "fp32", storage)
    _placed(name, facts, empty, devices, request, _asked(request, None))


def _asked(request: ModelRequest, budget_bytes: int | None) -> RunRequest:
    budget_gib = request.budget_gib if budget_bytes is None else budget_bytes / GIB
    offload: Any = request.offload
    return RunRequest.of(PlacementRequest(offload=offload, budget_gib=budget_gib))


def _placed(
    name: str,
    facts: ModelFacts,
    model: nn.Module,
    devices: Sequence[torch.device],
    request: ModelRequest,
    asked: RunRequest,
) -> tuple[Placement, list[torch.device]]:
    """Place a model on as few devices as hold all blocks, or on all; on those that were named."""
    least = len(devices) if request.cards is not None else 1
    found: tuple[Placement, list[torch.device]] | None = None
    refused: DoesNotFit | None = None
    for number in range(least, len(devices) + 1):
        try:
            found = placed(facts, model, devices[:number], asked)
        except DoesNotFit as error:
            refused = refused or error
            continue
        blocks = _blocks(found[0])
        if all(map(_stays, blocks)):
            break
    if found is None:
        raise DoesNotFit(f"{name} cannot be used here: {refused}") from refused
    return found


def _blocks(placement: Placement) -> list[GroupPlacement]:
    return [row for row in placement.groups if row.kind == "block"]


def _stays(row: GroupPlacement) -> bool:
    """Are the weights on the device for good?"""
    return row.is_on("device") or row.resident


def _in_words(placement: Placement, devices: Sequence[torch.device]) -> str:
    """Say where the weights are."""
    weights = _blocks(placement)
    here = sum(map(_stays, weights))
    size = bytes_text(placement.device_bytes)
    where = "the GPU" if devices[0].type == "cuda" else "the CPU"
    if len(devices) > 1:
        where = f"{len(devices)} {'GPUs' if devices[0].type == 'cuda' else 'parts of the CPU'}"
    if here == len(weights):
        return f"all {here} blocks on {where} ({size})"
    return f"{len(weights) - here} of {len(weights)} blocks streamed through {where} ({size})"
