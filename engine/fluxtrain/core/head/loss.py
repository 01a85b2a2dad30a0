"""A head's loss and the gradients of it: the head whole, in vocabulary chunks, or a module.

The loss of a head that is on the device whole computes its gradients in the forward pass, one chunk
of tokens at a time: their logits are there then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.core.cards.on_card import backward_on_card, forward_on_card
from fluxtrain.core.head.call import HeadCall
from fluxtrain.core.head.on_all_cards import is_dealt, loss_on_all_cards
from fluxtrain.core.head.steps import after, pull_back
from fluxtrain.core.head.token_loss import (
    HeadGradients,
    VocabRange,
    WholeLoss,
    add_product_,
    loss_of_tokens,
    scaled,
)
from fluxtrain.core.head.vocab_chunks import vocab_chunked_logits_backward, vocab_chunked_loss
from fluxtrain.core.runtime.passes import begin_backward, bound, end_backward, end_forward, record
from fluxtrain.errors import MisusedModel
from fluxtrain.plan.heads import LOGITS_CHUNK_BYTES


def loss_of_head(call: HeadCall, hidden: Tensor) -> Tensor:
    """Compute the cross entropy (0-d fp32) of the head's logits for hidden (N, H)."""
    if call.unit.in_vocab_chunks:
        return vocab_chunked_loss(call, hidden)
    loss: Tensor = _WholeHeadLoss.apply(call, call.context.anchor, hidden)  # type: ignore[no-untyped-call]
    return loss


def logits_backward(ctx: Any, hidden: Tensor, gradient: Tensor, wanted: bool) -> Tensor | None:
    """Compute the gradients of the head, for the engine, from that of its logits (..., V); return
    that of hidden (..., H) where it is wanted."""
    unit = ctx.call.unit
    if unit.in_vocab_chunks:
        return vocab_chunked_logits_backward(ctx, hidden, gradient, wanted)
    backward = _whole_backward if unit.is_linear_head else module_backward
    return backward(ctx, hidden, gradient, wanted)


class _WholeHeadLoss(torch.autograd.Function):
    """The loss of a head that is on the device whole; its gradients are computed in the forward."""

    @staticmethod
    @forward_on_card
    def forward(ctx: Any, call: HeadCall, anchor: Tensor, hidden: Tensor) -> Tensor:
        context, unit = record(ctx, call), call.unit
        for_hidden = call.differentiate and hidden.requires_grad
        with bound(context, unit, "head"):
            if unit.is_linear_head:
                loss = _loss_of_linear(call, hidden, for_hidden, *call.trained())
            else:
                loss = loss_of_module(call, hidden, for_hidden)
        end_forward(context, unit)
        return loss

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, Tensor | None]:
        call: HeadCall = ctx.call
        context, unit = begin_backward(ctx), call.unit
        if call.spent:
            raise MisusedModel(
                "a second backward pass over the same loss: its gradients at the head were "
                "computed in the forward pass and are spent, retain_graph=True does not keep them. "
                "Compute the loss again, or add the losses up before one backward()"
            )
        call.spent = True
        if call.kept_scale is not None:
            scale = scale * call.kept_scale
        for group, member in unit.members:
            total = call.sums.pop(id(member.parameter), None)
            if total is not None and member.parameter.requires_grad:
                context.gradients_of(group).add(group, member, total.mul_(scale), may_keep=True)
        total = None  # only the group's sum may hold it: gigabytes for a large vocabulary
        gradient, call.hidden_gradient = call.hidden_gradient, None
        end_backward(context, unit)
        return None, None, None if gradient is None else scaled(gradient, scale, gradient.dtype)


def _loss_of_linear(
    call: HeadCall, hidden: Tensor, for_hidden: bool, for_weight: bool, for_bias: bool
) -> Tensor:
    """Compute the loss (scalar, fp32) and, in `call`, the gradients that are wanted."""
    linear: Any = call.unit.module
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    target, count, wrong = call.targets()
    gradients = HeadGradients()
    if for_hidden:
        gradients.hidden = call.hidden_gradient = torch.empty_like(hidden)
    if for_weight:
        gradients.weight = torch.zeros(weight.shape, dtype=torch.float32, device=hidden.device)
        call.sums[id(linear.weight)] = gradients.weight
    if for_bias:
        assert bias is not None
        gradients.bias = torch.zeros(bias.shape, dtype=torch.float32, device=hidden.device)
        call.sums[id(linear.bias)] = gradients.bias
    scale = call.slope_scale(count, weight.dtype)
    loss = WholeLoss(
        words=VocabRange(weight=weight, bias=bias),
        target=target,
        scale=scale if for_hidden or for_weight or for_bias else None,
        dtype=call.dtype,
        steps=call.steps,
    )
    losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    if is_dealt(call.context, len(losses)):
        loss_on_all_cards(call, loss, hidden.detach(), losses, gradients)
    else:
        loss_of_tokens(loss, hidden.detach(), losses, gradients, call.context.head_tokens)
    return (losses.sum() / count).masked_fill(wrong, torch.nan)


def _whole_backward(ctx: Any, hidden: Tensor, gradient: Tensor, wanted: bool) -> Tensor | None:
    """Compute the gradients of weight and bias, for the engine; return that of hidden (..., H)
    where it is wanted."""
    call: HeadCall = ctx.call
    unit, (for_weight, for_bias) = call.unit, call.trained()
    linear: Any = unit.module
    context = begin_backward(ctx)
    sums: dict[int, Tensor] = {}
    with bound(context, unit, "backward"):
        weight, bias = linear.weight.detach(), linear.bias
        if call.steps:
            product = nn.functional.linear(hidden.detach(), weight, bias).to(call.dtype)
            gradient = pull_back(call.steps, product, gradient)
        gradient = gradient.to(hidden.dtype)
        slopes = gradient.reshape(-1, gradient.shape[-1])  # (N, V)
        found = gradient @ weight if wanted else None
        if for_weight:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            add_product_(total, slopes.t(), hidden.detach().reshape(-1, hidden.shape[-1]))
            sums[id(linear.weight)] = total
        if for_bias:
            sums[id(bias)] = slopes.sum(0, dtype=torch.float32)
    call.add(sums)
    end_backward(context, unit)
    return found


_COPIES = 6  # of a chunk's logits in fp32 that autograd and the steps hold


def loss_of_module(call: HeadCall, hidden: Tensor, for_hidden: bool) -> Tensor:
    """Compute the loss (0-d fp32) for hidden (N, H) of a head that is more than one linear layer,
    such as one with adapters, and, in `call`, the gradients that are wanted.

    Its own forward computes the logits of a chunk of tokens, and autograd the gradients of what is
    trained in it; they are added up in fp32. The module's parameters are on the device.
    """
    target, count, wrong = call.targets()
    trained = _trained(call) if call.differentiate else []
    scale = call.slope_scale(count, hidden.dtype)
    if for_hidden:
        call.hidden_gradient = torch.empty_like(hidden)
    losses = torch.zeros((), dtype=torch.float32, device=hidden.device)
    most = call.context.head_tokens or _tokens_at_once(call)
    for start in range(0, len(hidden), most):
        rows = slice(start, start + most)
        inner = hidden[rows].detach().requires_grad_(for_hidden)
        with torch.set_grad_enabled(for_hidden or bool(trained)):
            loss = nn.functional.cross_entropy(
                _logits(call, inner).float(), target[rows], ignore_index=-1, reduction="sum"
            )
            scaled = loss * scale
        losses += loss.detach()
        wanted = [*([inner] if for_hidden else []), *trained]
        if not wanted:
            continue
        found = list(torch.autograd.grad(scaled, wanted, allow_unused=True))
        if call.hidden_gradient is not None:
            call.hidden_gradient[rows] = found.pop(0)
        _add(call.sums, trained, found)
    return (losses / count).masked_fill(wrong, torch.nan)


def module_backward(ctx: Any, hidden: Tensor, gradient: Tensor, wanted: bool) -> Tensor | None:
    """Compute the gradients of what is trained, for the engine, from that of the logits (..., V);
    return that of hidden (..., H) where it is wanted."""
    call: HeadCall = ctx.call
    unit, trained = call.unit, _trained(call)
    context = begin_backward(ctx)
    inner = hidden.detach().requires_grad_(wanted)
    sums: dict[int, Tensor] = {}
    found: list[Tensor | None] = []
    with bound(context, unit, "backward"), torch.enable_grad():
        logits = _logits(call, inner)
        of = [*([inner] if wanted else []), *trained]
        if of:
            gradient = gradient.to(logits.dtype)
            found = list(torch.autograd.grad(logits, of, gradient, allow_unused=True))
    for_hidden = found.pop(0) if wanted else None
    _add(sums, trained, found)
    call.add(sums)
    end_backward(context, unit)
    return for_hidden


def _logits(call: HeadCall, hidden: Tensor) -> Tensor:
    product: Tensor = call.unit.original(hidden)
    return after(call.steps, product.to(call.dtype))


def _trained(call: HeadCall) -> list[nn.Parameter]:
    return [m.parameter for _, m in call.unit.members if m.parameter.requires_grad]


def _add(
    sums: dict[int, Tensor], trained: list[nn.Parameter], found: Sequence[Tensor | None]
) -> None:
    """Add gradients to their fp32 sums; None where a parameter was not used."""
    for parameter, gradient in zip(trained, found, strict=False):
        if gradient is None:
            continue
        total = sums.get(id(parameter))
        if total is None:
            sums[id(parameter)] = gradient.to(torch.float32, copy=True)
        else:
            total += gradient


def _tokens_at_once(call: HeadCall) -> int:
    assert call.unit.linear is not None
    return max(1, LOGITS_CHUNK_BYTES // (4 * call.unit.linear.out_features * _COPIES))
