"""Computes logits of a model that is larger than host memory: each part's weights are read from
their mapped files when it runs, and given up after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.exporting.trained_base import dequantised
from fluxtrain.guards.arguments import to_device
from fluxtrain.plan.states import StorageFormat
from fluxtrain.wrapping.block_discovery import take_apart
from fluxtrain.wrapping.grouping import group_parameters
from fluxtrain.wrapping.module_patches import move_buffers


def mapped_logits(
    model: nn.Module, inputs: dict[str, Any], device: str, storage: StorageFormat
) -> Tensor:
    """Return the logits (B, T, V) in one pass without gradients; the model is as it was afterwards,
    but for its buffers, which stay on `device`."""
    target = torch.device(device)
    parts = take_apart(model)
    groups, _ = group_parameters(model, parts, frozen=storage)
    packed = {
        id(member.parameter): f"{group.name}.{member.name}"
        for group in groups.values()
        for segment in group.segments
        if segment.storage != "plain"
        for member in segment.members
    }

    def read(parameter: nn.Parameter) -> Tensor:
        weights = parameter.detach()
        if name := packed.get(id(parameter)):
            weights = dequantised(weights, storage, name)
        return weights.to(target)

    move_buffers(model, target)
    for _, parameter in parts.loose:
        parameter.data = parameter.data.to(target)
    with ExitStack() as hooks, torch.no_grad():
        for _, module in (*parts.edges, *parts.blocks):
            _fill_while_it_runs(module, read, hooks)
        moved, _ = to_device(((), inputs), target)
        told: Any = model(*moved[0], **moved[1])
    logits: Tensor = told.logits.detach()
    return logits


def _fill_while_it_runs(
    module: nn.Module, read: Callable[[nn.Parameter], Tensor], hooks: ExitStack
) -> None:
    own: list[tuple[nn.Parameter, Tensor]] = []

    def fill(*_: object) -> None:
        for parameter in module.parameters():
            own.append((parameter, parameter.data))
            parameter.data = read(parameter)

    def give_up(*_: object) -> None:
        while own:
            parameter, weights = own.pop()
            parameter.data = weights

    hooks.callback(module.register_forward_pre_hook(fill).remove)
    hooks.callback(module.register_forward_hook(give_up, always_call=True).remove)
