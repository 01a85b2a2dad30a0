"""Places a model that is not trained: weights alone, no gradients and no optimizer states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fluxtrain.errors import DoesNotFit
from fluxtrain.hardware.machine import read_machine
from fluxtrain.models.copies import Copied
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.choices.placement import Placement, place_for_any_rows
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.plan.states import StorageFormat
from fluxtrain.planning.device_budget import hold_to_budget
from fluxtrain.planning.keeping import packed_cache
from fluxtrain.planning.placing import capacity_of
from fluxtrain.units import GIB, bytes_text
from fluxtrain.wrapping.engine import Engine, engine_of
from fluxtrain.wrapping.grouping import facts_of
from fluxtrain.wrapping.target import free_capacity
from fluxtrain.wrapping.wrap import Keeping, wrap_placed

if TYPE_CHECKING:
    from fluxtrain.inference.opening.request import ModelRequest


def place_for_use(
    loaded: LoadedModel,
    device: torch.device,
    storage: StorageFormat,
    request: ModelRequest,
    tell: Callable[[str], None],
) -> tuple[Engine, str]:
    """Stream a loaded model through `device`; return its engine, and its places in words.

    Half of the device's memory is left for the cache of keys and values and for activations.
    Raises DoesNotFit where neither the device nor the host has room.
    """
    budget_bytes = hold_to_budget(request.budget_gib) if device.type == "cuda" else None
    asked = _asked(request, budget_bytes)
    facts = facts_of(loaded.model, "fp32", storage)
    placement = _placed(loaded.name, facts, free_capacity(loaded.model, device), asked)
    keeping: Keeping | None = None
    if storage != "plain" and loaded.weight_files:
        keeping = partial(packed_cache, loaded, storage, tell)
    wrap_placed(
        loaded.model, device.type, placement, states="fp32", frozen=storage, keeping=keeping
    )
    return engine_of(loaded.model), _in_words(placement, device)


def refuse_before_loading(
    request: ModelRequest,
    device: torch.device,
    storage: StorageFormat,
    name: str,
    empty: nn.Module,
    copied: Copied,
) -> None:
    """Raise DoesNotFit, from a model without its weights, where they cannot be read or placed."""
    empty.requires_grad_(False)
    capacity = capacity_of(read_machine(), device.type)
    needed, there = copied.weights_bytes + copied.sources_bytes, capacity.host_available_bytes
    if there is not None and needed > there:
        raise DoesNotFit(
            f"{name} cannot be used here: reading it in another dtype than its files' makes copies "
            f"of {bytes_text(needed)}, and {bytes_text(there)} of host memory are free: leave "
            "--dtype out, or close other programs"
        )
    _placed(name, facts_of(empty, "fp32", storage), capacity, _asked(request, None))


def _asked(request: ModelRequest, budget_bytes: int | None) -> RunRequest:
    budget_gib = request.budget_gib if budget_bytes is None else budget_bytes / GIB
    offload: Any = request.offload
    return RunRequest.of(PlacementRequest(offload=offload, budget_gib=budget_gib))


def _placed(name: str, facts: ModelFacts, capacity: Capacity, asked: RunRequest) -> Placement:
    try:
        return place_for_any_rows(facts, capacity, asked)
    except DoesNotFit as error:
        raise DoesNotFit(f"{name} cannot be used here: {error}") from error


def _in_words(placement: Placement, device: torch.device) -> str:
    """Say where the weights are."""
    weights = [row for row in placement.groups if row.kind == "block"]
    here = sum(row.weights == "device" or row.resident for row in weights)
    size = bytes_text(placement.device_bytes)
    where = "the GPU" if device.type == "cuda" else "the CPU"
    if here == len(weights):
        return f"all {here} blocks on {where} ({size})"
    return f"{len(weights) - here} of {len(weights)} blocks streamed through {where} ({size})"
