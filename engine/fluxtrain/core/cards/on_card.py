"""Decorators of autograd functions: compute where the unit's card computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from fluxtrain.core.runtime.arrivals import arrivals_of, wait_for_all
from fluxtrain.core.runtime.card import EngineCard
from fluxtrain.core.runtime.passes import UnitCall

F = TypeVar("F", bound=Callable[..., Any])


def forward_on_card(forward: F) -> F:
    """Run `forward(ctx, call, ...)` of an autograd function on the card of the call's unit."""

    @wraps(forward)
    def on_card(ctx: Any, call: UnitCall, *rest: Any) -> Any:
        card = call.context.card_of(call.unit)
        if len(call.context.cards) == 1:
            return forward(ctx, call, *rest)
        with card.computing(joins=call.joins, lane=call.unit.lane):
            _await(card, call, rest)
            found = forward(ctx, call, *rest)
        return _handed_out(card, found)

    return cast(F, on_card)


def backward_on_card(backward: F) -> F:
    """Run `backward(ctx, *gradients)`, whose `ctx.call` is known, on the card of the call's unit.

    It waits for code outside of blocks only where that may have made a gradient: of gradients that
    the next block made it is noted when their rows are there.
    """

    @wraps(backward)
    def on_card(ctx: Any, *gradients: Tensor | None) -> Any:
        context = ctx.call.context
        if len(context.cards) == 1:
            return backward(ctx, *gradients)
        call = ctx.call
        card = context.card_of(call.unit)
        outside = any(one is not None and arrivals_of(one) is None for one in gradients)
        with card.computing(joins="now" if outside else "no", lane=call.unit.lane):
            _await(card, call, gradients)
            found = backward(ctx, *gradients)
        return _handed_out(card, found)

    return cast(F, on_card)


def _await(card: EngineCard, call: UnitCall, given: Iterable[Any]) -> None:
    """Wait for tensors that arrive from other cards, except for a call that computes chunks of
    rows."""
    if not call.awaits_rows:
        wait_for_all(card.device, (one for one in given if isinstance(one, Tensor)))


def _handed_out(card: EngineCard, found: Any) -> Any:
    for one in found if isinstance(found, tuple) else (found,):
        if type(one) is Tensor:  # logits that are not computed yet have no memory
            card.device.hand_out(one)
    return found
