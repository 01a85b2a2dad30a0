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
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from fluxtrain.handover.carried import carried, sent_back
from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.cards.pieces import wait_for_all
from fluxtrain.runtime.context import Context


class Handed(Tensor):
    """An alias of a tensor on another card, without memory of its own.

    Functions of torch see the tensor on the first card in its place. What never asks for such a
    replacement (an `autograd.Function`, `vmap`, hooks of modules) computes with the alias: autograd
    knows it as made from the tensor, and each operation below autograd gets the values.
    """

    plain: Tensor
    context: Context
    card: Card  # where `plain` is
    brought: Tensor | None  # the same on the first card, once code has used it

    @staticmethod
    def of(plain: Tensor, context: Context, card: Card) -> Handed:
        """Hand out `plain`, which `card` computes."""
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and plain.requires_grad:
                made: Handed = _Alias.apply(plain, context, card)  # type: ignore[no-untyped-call]
            else:
                made = _alias(plain, context)
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
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _on_values(func, args, kwargs)


def _on_values(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Call `func` with the tensors on the first card in place of their aliases."""
    args, kwargs = pytree.tree_map_only(Handed, on_first_card, (args, kwargs or {}))
    return func(*args, **kwargs)


def _alias(plain: Tensor, context: Context) -> Handed:
    """Return what looks like `plain` on the first card."""
    made: Handed = Tensor._make_wrapper_subclass(
        Handed, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype,
        device=context.device.torch_device,
    )  # fmt: skip
    return made


class _Alias(torch.autograd.Function):
    """Takes gradients of the alias itself to the tensor's card."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, context: Context, card: Card) -> Tensor:
        ctx.first, ctx.card = context.cards[0], card
        return _alias(plain, context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sent_back(gradient, ctx.first, ctx.card), None, None


_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "layout")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}


def on_first_card(handed: Handed) -> Tensor:
    """Return the tensor on the first card; the code that uses it waits for all of it."""
    context = handed.context
    if handed.brought is None:
        context.say(
            "this model computes between its blocks with what they return: where that is on "
            "another card it is copied to the first one, which waits for it"
        )
        # with its graph even where the first to use it computes no gradients: others may
        with torch.inference_mode(False), torch.enable_grad():
            handed.brought = bring(handed.plain, context, handed.card)
    return handed.brought


def bring(plain: Tensor, context: Context, card: Card) -> Tensor:
    """Copy a tensor of `card` to the first card, for code outside of blocks."""
    first = context.cards[0]
    found = carried(plain, card, first)
    wait_for_all(first.device, [found])
    return found
