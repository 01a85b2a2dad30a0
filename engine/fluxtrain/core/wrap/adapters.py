"""Adapters on a wrapped base: late ones, and DoRA's magnitudes on packed weights.

TRL puts adapters into a model after it was wrapped, where it is given a `peft_config`. peft takes
DoRA's magnitudes from the weights before these are packed; the first output of a fresh adapter
would then not be that of its base (Liu et al. 2024, https://arxiv.org/abs/2402.09353).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.packed import all_dense_weights
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.wrap.engine import Engine
from fluxtrain.errors import MisusedModel
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import RunRequest

_Weights = dict[int, tuple[Group, Member]]  # by the identity of the parameter


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of peft's adapters in the model."""
    found = getattr(model, "peft_config", None)
    return tuple(found) if isinstance(found, dict) else ()


def refuse_late(engine: Engine, asked: RunRequest | Placement) -> None:
    """Raise MisusedModel where the model cannot be wrapped again as before."""
    if any(group.packed_segments for group in engine.groups):
        why = "its base is packed, which packing once more would change"
    elif isinstance(asked, Placement):
        why = "its placement was made without them"
    else:
        return
    raise MisusedModel(
        f"adapters were put into the model after fluxtrain.wrap, and {why}: put them first, "
        "fluxtrain.wrap(get_peft_model(model, config)), and give a trainer that model without a "
        "peft_config"
    )


def take_magnitudes_of_packed(model: nn.Module, groups: list[Group]) -> None:
    """Set the magnitudes of fresh DoRA adapters on packed weights; trained ones stay."""
    members: _Weights = {id(m.parameter): (g, m) for g in groups for m in g.members}
    at: Group | None = None
    dense: dict[int, Tensor] = {}
    for layer, weight, magnitude in _fresh(model, members):
        group, member = members[id(weight)]
        if group is not at:
            at, dense = group, all_dense_weights(group.segments)
        weights = dense[member.index]
        norms = torch.linalg.norm(weights.T if layer.fan_in_fan_out else weights, dim=1)
        owner, own = members[id(magnitude)]
        with torch.no_grad():
            owner.memory.views[own.index].copy_(norms.to(magnitude.dtype))


def _fresh(model: nn.Module, members: _Weights) -> Iterator[tuple[Any, nn.Parameter, nn.Parameter]]:
    """Yield DoRA's layers on packed weights with the weight and the magnitudes, in the model's
    order, where the adapter is untrained: its second matrix is zero."""
    for module in model.modules():
        vectors = getattr(module, "lora_magnitude_vector", None)
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if not vectors or id(weight) not in members:
            continue
        if members[id(weight)][1].segment.packed is None:
            continue
        for name, layer in vectors.items():
            adapter: Any = module
            second = adapter.lora_B[name].weight
            group, member = members.get(id(second), (None, None))
            values = second if group is None or member is None else group.memory.views[member.index]
            if id(layer.weight) in members and not bool(values.any()):
                assert isinstance(weight, nn.Parameter)
                yield layer, weight, layer.weight
