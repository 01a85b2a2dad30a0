"""The arguments of a unit, on the card that it runs on, and its outputs as the model sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxtrain.guards.arguments import flatten
from fluxtrain.handover.carried import carried
from fluxtrain.handover.handed import Handed, bring
from fluxtrain.memory.unit import Unit
from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.context import Context


def receive(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the unit's arguments with all tensors on its card or on their way there. Those that
    many blocks get, and that ask for no gradient, are copied once."""
    tree, tensors = flatten((args, kwargs), once=True)
    card = context.card_of(unit)
    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = tree.fill([_received(context, card, unit, tensor) for tensor in tensors])
    return found


def hand_over(context: Context, unit: Unit, out: Any) -> Any:
    """Return the unit's outputs as code between the blocks sees them."""
    if not unit.card:
        return out
    card = context.card_of(unit)
    tree, tensors = flatten(out)
    return tree.fill(
        [Handed.of(t, context, card) if t.device == card.torch_device else t for t in tensors]
    )


def _received(context: Context, card: Card, unit: Unit, tensor: Tensor) -> Tensor:
    source = context.cards[0]
    if isinstance(tensor, Handed):
        handed: Any = tensor
        brought = handed.brought is not None
        tensor, source = (handed.brought, source) if brought else (handed.plain, handed.card)
    if source is card:
        return tensor
    if unit.group.kind != "block" and card.number == 0:
        return bring(tensor, context, source)
    if tensor.device.type == "cpu" and card.torch_device.type == "cuda":
        return tensor  # copied like any argument on the host
    if source.number or (torch.is_grad_enabled() and tensor.requires_grad):
        return carried(tensor, source, card)
    return card.shared.copy_of(tensor, lambda: carried(tensor, source, card))
