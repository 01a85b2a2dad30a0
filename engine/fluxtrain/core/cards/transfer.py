"""Tensors between cards: what a unit receives, and what it returns as the model sees it.

Models compute between their blocks, and do not know that these are on several cards. The next block
takes what a block on another card returns as it is, chunk by chunk. Any other use of it copies it
to the first card, where everything else of the model is, and from then on it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from fluxtrain.core.guards.arguments import Moved, flatten, write_back
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.arrivals import arrivals_of, note_arrivals, wait_for_all
from fluxtrain.core.runtime.card import EngineCard
from fluxtrain.core.runtime.context import Context


def receive(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Moved]:
    """Return the unit's arguments with all tensors on its card or on their way, and which of them
    are copies.

    Tensors that many blocks get and that require no gradient are copied once.
    """
    tree, tensors = flatten((args, kwargs), once=True)
    card = context.card_of(unit)
    known = [_known(context, tensor) for tensor in tensors]
    there = [_received(context, card, unit, *each) for each in known]
    pairs = zip(known, there, strict=True)
    moved = [(theirs, new, new._version) for (theirs, _), new in pairs if new is not theirs]
    return tree.fill(there), moved


def write_back_arguments(context: Context, moved: Moved) -> None:
    """Copy a unit's in-place writes back from copies of its arguments to the originals.

    Waits for all cards: blocks of any may read them, and hardly any model writes like this.
    """
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


def as_seen_on_first_card(context: Context, unit: Unit, out: Any) -> Any:
    """Return the unit's outputs as code between the blocks sees them."""
    if not unit.card:
        return out
    card = context.card_of(unit)
    tree, tensors = flatten(out)
    return tree.fill(
        [
            SeenOnFirstCard.of(t, context, card) if t.device == card.torch_device else t
            for t in tensors
        ]
    )


def _known(context: Context, tensor: Tensor) -> tuple[Tensor, EngineCard]:
    """Return the original of a unit's argument on its own card, and that card."""
    if not isinstance(tensor, SeenOnFirstCard):
        return tensor, context.cards[0]
    seen: Any = tensor
    if seen.brought is not None:
        return seen.brought, context.cards[0]
    return seen.plain, seen.card


def _received(
    context: Context, card: EngineCard, unit: Unit, tensor: Tensor, source: EngineCard
) -> Tensor:
    if source is card:
        return tensor
    if unit.group.kind != "block" and card.number == 0:
        return receive_on_first_card(tensor, context, source)
    if tensor.device.type == "cpu" and card.torch_device.type == "cuda":
        return tensor  # copied like any argument on the host
    if source.number or (torch.is_grad_enabled() and tensor.requires_grad):
        return send(tensor, source, card)
    return card.shared.copy_of(tensor, lambda: send(tensor, source, card))


def send(tensor: Tensor, source: EngineCard, target: EngineCard) -> Tensor:
    """Return the tensor's copy on `target`, in torch's graph where it asks for a gradient. It is
    noted when rows of the copy are there (`arrivals_of`)."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: Tensor = _Sent.apply(tensor, source, target)  # type: ignore[no-untyped-call]
        return found
    return send_values(tensor, source, target)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: EngineCard, target: EngineCard) -> Tensor:
        ctx.source, ctx.target = source, target
        return _copy(tensor, tensor, source, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return send_gradient(gradient, ctx.target, ctx.source), None, None


def send_gradient(gradient: Tensor, source: EngineCard, target: EngineCard) -> Tensor:
    """Return a copy of a gradient on `target`, and let code outside of blocks wait for it: torch
    may pass it to an operation between two blocks, or add it to another."""
    made = _copy(gradient, gradient, source, target)
    arrivals = arrivals_of(made)
    for point in () if arrivals is None else arrivals.points:
        target.device.wait_outside(point)
    return made


def send_values(values: Tensor, source: EngineCard, target: EngineCard) -> Tensor:
    """Return a copy of `values` on `target` as `send` does, outside of torch's graph."""
    return _copy(values.detach(), values, source, target)


def _copy(values: Tensor, known: Tensor, source: EngineCard, target: EngineCard) -> Tensor:
    """Copy `values` to `target` as they are computed, by the arrivals noted for `known`.

    Of a block with several results the first chunk of each leaves before the last of any is there.
    """
    arrivals, way = arrivals_of(known), next(target.ways)
    with torch.inference_mode(False):  # so that writes to it are counted
        made = target.device.landing(values, way)
    target.counts.landed_bytes += values.nbytes
    if arrivals is None or not values.dim():
        point = target.device.land(made, values, [source.device.mark()], source.device, way)
        rows = values.shape[0] if values.dim() else 1
        return note_arrivals(made, [(0, rows)], [point])
    points = [
        target.device.land(made[a:b], values[a:b], [point], source.device, way)
        for (a, b), point in zip(arrivals.spans, arrivals.points, strict=True)
    ]
    return note_arrivals(made, arrivals.spans, points)


class SeenOnFirstCard(Tensor):
    """An alias of a tensor on another card, without memory.

    torch's functions get the tensor on the first card in its place. Code that never asks for such
    a replacement (an `autograd.Function`, `vmap`, hooks of modules) computes with the alias:
    autograd knows it as made from the tensor, and each operation below autograd gets the values.
    """

    plain: Tensor
    context: Context
    card: EngineCard  # where `plain` is
    brought: Tensor | None  # the same on the first card, once code has used it

    @staticmethod
    def of(plain: Tensor, context: Context, card: EngineCard) -> SeenOnFirstCard:
        """Return the alias of `plain`, which `card` computes."""
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and plain.requires_grad:
                made: SeenOnFirstCard = _Alias.apply(plain, context, card)  # type: ignore[no-untyped-call]
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
    args, kwargs = pytree.tree_map_only(SeenOnFirstCard, copy_on_first_card, (args, kwargs or {}))
    return func(*args, **kwargs)


def _alias(plain: Tensor, context: Context) -> SeenOnFirstCard:
    """Return a tensor that looks like `plain` on the first card."""
    made: SeenOnFirstCard = Tensor._make_wrapper_subclass(
        SeenOnFirstCard, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype,
        device=context.device.torch_device,
    )  # fmt: skip
    return made


class _Alias(torch.autograd.Function):
    """Passes gradients of the alias to the tensor's card."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, context: Context, card: EngineCard) -> Tensor:
        ctx.first, ctx.card = context.cards[0], card
        return _alias(plain, context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return send_gradient(gradient, ctx.first, ctx.card), None, None


_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "layout")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}


def copy_on_first_card(seen: SeenOnFirstCard) -> Tensor:
    """Return the tensor on the first card; the code that uses it waits for all of it."""
    context = seen.context
    if seen.brought is None:
        context.say(
            "this model computes between its blocks with what they return: where that is on "
            "another card it is copied to the first one, which waits for it"
        )
        # with its graph even where the first to use it computes no gradients: others may
        with torch.inference_mode(False), torch.enable_grad():
            seen.brought = receive_on_first_card(seen.plain, context, seen.card)
    return seen.brought


def receive_on_first_card(plain: Tensor, context: Context, card: EngineCard) -> Tensor:
    """Copy a tensor of `card` to the first card, for code outside of blocks."""
    first = context.cards[0]
    found = send(plain, card, first)
    wait_for_all(first.device, [found])
    return found
