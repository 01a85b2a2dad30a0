"""The arguments of a unit, on the card that it runs on, and its outputs as the model sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxtrain.guards.arguments import Moved, flatten, write_back
from fluxtrain.handover.carried import carried
from fluxtrain.handover.handed import Handed, bring
from fluxtrain.memory.unit import Unit
from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.context import Context


def receive(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Moved]:
    """Return the unit's arguments with all tensors on its card or on their way there, and which of
    them are copies. Those that many blocks get, and that ask for no gradient, are copied once."""
    tree, tensors = flatten((args, kwargs), once=True)
    card = context.card_of(unit)
    known = [_known(context, tensor) for tensor in tensors]
    there = [_received(context, card, unit, *each) for each in known]
    pairs = zip(known, there, strict=True)
    moved = [(theirs, new, new._version) for (theirs, _), new in pairs if new is not theirs]
    return tree.fill(there), moved


def give_back(context: Context, moved: Moved) -> None:
    """Copy what the unit wrote in place to copies of its arguments to where these came from. Waits
    for all cards: blocks of any may read them, and hardly any model does this."""
    written = [each for each in moved if each[1]._version != each[2]]
    if not written:
        return
    _wait_for_all_cards(context)
    with torch.no_grad():
        write_back(written)
    _wait_for_all_cards(context)


def _wait_for_all_cards(context: Context) -> None:
    for card in context.cards:
        if card.torch_device.type == "cuda":
            torch.cuda.synchronize(card.torch_device)


def hand_over(context: Context, unit: Unit, out: Any) -> Any:
    """Return the unit's outputs as code between the blocks sees them."""
    if not unit.card:
        return out
    card = context.card_of(unit)
    tree, tensors = flatten(out)
    return tree.fill(
        [Handed.of(t, context, card) if t.device == card.torch_device else t for t in tensors]
    )


def _known(context: Context, tensor: Tensor) -> tuple[Tensor, Card]:
    """Return a tensor that a unit is given as it is on a card, and that card."""
    if not isinstance(tensor, Handed):
        return tensor, context.cards[0]
    handed: Any = tensor
    if handed.brought is not None:
        return handed.brought, context.cards[0]
    return handed.plain, handed.card


def _received(context: Context, card: Card, unit: Unit, tensor: Tensor, source: Card) -> Tensor:
    if source is card:
        return tensor
    if unit.group.kind != "block" and card.number == 0:
        return bring(tensor, context, source)
    if tensor.device.type == "cpu" and card.torch_device.type == "cuda":
        return tensor  # copied like any argument on the host
    if source.number or (torch.is_grad_enabled() and tensor.requires_grad):
        return carried(tensor, source, card)
    return card.shared.copy_of(tensor, lambda: carried(tensor, source, card))
