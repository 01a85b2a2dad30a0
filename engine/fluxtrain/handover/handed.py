"""What a block on another card returns, as code between the blocks sees it: on the first card.

Models compute between their blocks, and do not know that these are on several cards. The next block
takes such a tensor as it is, chunk by chunk. Any other use of it copies it to the first card, where
everything else of the model is, and from then on it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fluxtrain.handover.carried import carried
from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.cards.pieces import wait_for_all
from fluxtrain.runtime.context import Context


class Handed(Tensor):
    """An alias of a tensor on another card."""

    plain: Tensor
    context: Context
    card: Card  # where `plain` is
    brought: Tensor | None  # the same on the first card, once code has used it

    @staticmethod
    def of(plain: Tensor, context: Context, card: Card) -> Handed:
        """Hand out `plain`, which `card` computes."""
        with torch._C.DisableTorchFunctionSubclass():
            alias: Any = plain.detach().as_subclass(Handed)
            alias.requires_grad_(plain.requires_grad)
        made: Handed = alias
        made.plain, made.context, made.card, made.brought = plain, context, card, None
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is _DEVICE:
            return args[0].context.device.torch_device
        there = pytree.tree_map_only(Handed, on_first_card, (args, kwargs or {}))
        return func(*there[0], **there[1])


_DEVICE = Tensor.device.__get__
_FACTS = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "requires_grad", "ndim", "layout")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}


def on_first_card(handed: Handed) -> Tensor:
    """Return the tensor on the first card; the code that uses it waits for all of it."""
    context = handed.context
    if handed.brought is None:
        context.say(
            "this model computes between its blocks with what they return: where that is on "
            "another card it is copied to the first one, which waits for it"
        )
        handed.brought = bring(handed.plain, context, handed.card)
    return handed.brought


def bring(plain: Tensor, context: Context, card: Card) -> Tensor:
    """Copy a tensor of `card` to the first card, for code outside of blocks."""
    first = context.cards[0]
    found = carried(plain, card, first)
    wait_for_all(first.device, [found])
    return found
