"""The head's weight on the device, for code that multiplies by it outside of the head's forward.

TRL's trainers (from 1.16) compute their losses from `model.get_output_embeddings().weight` and move
the hidden states to where that is. A wrapped head's weight is on the host between computations, so
all of the vocabulary's products would be computed there, without a word. While such a forward runs,
the model returns a `DeviceHead` in place of its head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.core.cards.on_card import backward_on_card, forward_on_card
from fluxtrain.core.head.vocab_chunks import copy_whole
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import (
    UnitCall,
    begin_backward,
    begin_forward,
    bound,
    end_backward,
    end_forward,
    record,
)

FLAG = "fused_lm_head"  # the argument with which TRL asks a model for its fused loss
_GETTER = "get_output_embeddings"


class DeviceHead:
    """Stands for a head: its weight (V, H) and bias (V,) or None, on the device for one forward
    and its backward.

    The head has its own slot, so the weight stays there until its update.
    """

    def __init__(self, context: Context, unit: Unit) -> None:
        self.weight, self.bias = _on_device(context, unit)


def serve(model: nn.Module, context: Context) -> None:
    """Let the model return a `DeviceHead` until `end`."""
    unit = next((unit for unit in context.units if unit.is_linear_head), None)
    if unit is None:
        return
    made: list[DeviceHead] = []

    def device_head() -> DeviceHead:
        if not made:
            made.append(DeviceHead(context, unit))
        return made[0]

    for module in _above(model, unit.module):
        if _GETTER not in module.__dict__ and hasattr(type(module), _GETTER):
            module.__dict__[_GETTER] = device_head


def end(model: nn.Module, context: Context) -> None:
    """Let the model return its head again."""
    for unit in context.units:
        if unit.is_linear_head:
            for module in _above(model, unit.module):
                module.__dict__.pop(_GETTER, None)


def _above(module: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules from `module` down to the one that has the head."""
    yield module
    for child in module.children():
        if child is not head and any(inner is head for inner in child.modules()):
            yield from _above(child, head)


def _on_device(context: Context, unit: Unit) -> tuple[Tensor, Tensor | None]:
    begin_forward(context, unit)
    if unit.in_vocab_chunks:
        copy_whole(context, unit, "its weight is multiplied by outside of it (TRL's fused loss)")
    call = UnitCall(context, unit)
    if torch.is_grad_enabled() and any(m.parameter.requires_grad for _, m in unit.members):
        weight, bias = _Weights.apply(call, context.anchor)  # type: ignore[no-untyped-call]
    else:
        weight, bias = _bound_weights(call)
    end_forward(context, unit)
    return weight, bias


def _bound_weights(call: UnitCall) -> tuple[Tensor, Tensor | None]:
    linear: Any = call.unit.module
    with bound(call.context, call.unit, "head"):
        bias = None if linear.bias is None else linear.bias.detach()
        return linear.weight.detach(), bias


class _Weights(torch.autograd.Function):
    """Weight and bias in torch's graph; their gradients go where those of the head go."""

    @staticmethod
    @forward_on_card
    def forward(ctx: Any, call: UnitCall, anchor: Tensor) -> tuple[Tensor, Tensor | None]:
        record(ctx, call)
        ctx.set_materialize_grads(False)
        return _bound_weights(call)

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        context = begin_backward(ctx)
        unit: Unit = ctx.call.unit
        linear: Any = unit.module
        found = {id(linear.weight): gradients[0], id(linear.bias): gradients[1]}
        for group, member in unit.members:
            gradient = found.get(id(member.parameter))
            if gradient is not None and member.parameter.requires_grad:
                context.gradients_of(group).add(group, member, gradient)
        end_backward(context, unit)
        return None, None
