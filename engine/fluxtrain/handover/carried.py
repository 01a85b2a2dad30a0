"""A tensor of one card, copied to another in the pieces that it is computed in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fluxtrain.runtime.cards.card import Card
from fluxtrain.runtime.cards.pieces import note_pieces, pieces_of


def carried(tensor: Tensor, source: Card, target: Card) -> Tensor:
    """Return the tensor's copy on `target`, in torch's graph where it asks for a gradient. The copy
    says piece by piece when it is there."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: Tensor = _Carried.apply(tensor, source, target)  # type: ignore[no-untyped-call]
        return found
    return sent(tensor, source, target)


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: Card, target: Card) -> Tensor:
        ctx.source, ctx.target = source, target
        return _sent(tensor, tensor, source, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sent_back(gradient, ctx.target, ctx.source), None, None


def sent_back(gradient: Tensor, source: Card, target: Card) -> Tensor:
    """Return a copy of a gradient on `target`, which code outside waits for: a block knows when it
    is there, but torch may give it to an operation between two blocks, or add it to another."""
    made = _sent(gradient, gradient, source, target)
    pieces = pieces_of(made)
    for point in () if pieces is None else pieces.points:
        target.device.wait_outside(point)
    return made


def sent(values: Tensor, source: Card, target: Card) -> Tensor:
    """Return a copy of `values` on `target`, outside of torch's graph; it says when it is there."""
    return _sent(values.detach(), values, source, target)


def _sent(values: Tensor, known: Tensor, source: Card, target: Card) -> Tensor:
    """Copy `values` to `target` as they are computed; `known` says when, if that is known."""
    pieces = pieces_of(known)
    with torch.inference_mode(False):  # so that writes to it are counted
        made = target.device.landing(values)
    target.counts.landed_bytes += values.nbytes
    if pieces is None or not values.dim():
        point = target.device.land(made, values, [source.device.mark()], source.device)
        rows = values.shape[0] if values.dim() else 1
        return note_pieces(made, [(0, rows)], [point])
    points = [
        target.device.land(made[a:b], values[a:b], [point], source.device)
        for (a, b), point in zip(pieces.spans, pieces.points, strict=True)
    ]
    return note_pieces(made, pieces.spans, points)
