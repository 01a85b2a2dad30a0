"""The gradient of lazy logits that an autograd function outside the engine used.

Such a function (a fused loss, a module's backward hook, reentrant checkpointing) gets `LazyLogits`
below torch's Python calls. It reads values that are computed for it, and its gradient arrives at
the lazy logits; from there it is passed on to the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.edges.chunk_loss import add_product_
from fluxtrain.edges.chunked_head import vocab_chunked_logits_backward
from fluxtrain.edges.head_call import HeadCall
from fluxtrain.edges.module_head import module_backward
from fluxtrain.edges.steps import pull_back
from fluxtrain.errors import MisusedModel
from fluxtrain.handover.on_card import backward_on_card, forward_on_card
from fluxtrain.runtime.passes import begin_backward, bound, end_backward, record

Computed = list[tuple[Tensor, int]]  # real logits that were read, and their versions then


def with_gradient(
    call: HeadCall, hidden: Tensor, make: Callable[[], Tensor], seen: Computed
) -> Tensor:
    """Connect the lazy logits (..., V) that `make` returns to hidden (..., H) in torch's graph.
    `seen`: the real logits that code outside the engine read."""
    anchor = call.context.anchor
    logits: Tensor = _Uncomputed.apply(call, anchor, hidden, make, seen)  # type: ignore[no-untyped-call]
    return logits


class _Uncomputed(torch.autograd.Function):
    @staticmethod
    @forward_on_card
    def forward(
        ctx: Any,
        call: HeadCall,
        anchor: Tensor,
        hidden: Tensor,
        make: Callable[[], Tensor],
        seen: Computed,
    ) -> Tensor:
        record(ctx, call)
        ctx.seen = seen
        ctx.save_for_backward(hidden)
        return make()

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, None, None]:
        call: HeadCall = ctx.call
        (hidden,) = ctx.saved_tensors
        _refuse_other_gradients(call, ctx.seen)
        if call.unit.in_vocab_chunks:
            backward = vocab_chunked_logits_backward
        else:
            backward = _whole_backward if call.unit.is_linear_head else module_backward
        return None, None, backward(ctx, hidden, gradient, ctx.needs_input_grad[2]), None, None


def _refuse_other_gradients(call: HeadCall, seen: Computed) -> None:
    changed = any(real._version != version for real, version in seen)
    watched = any(real.retains_grad or real._backward_hooks for real, _ in seen)
    if changed or watched or any(m.parameter._backward_hooks for _, m in call.unit.members):
        raise MisusedModel(
            "outputs.logits were handed to an autograd function of its own (a fused loss, a "
            "module's backward hook), and were written in place, or they or the head's weight have "
            "a hook or retain_grad(), which would not see the gradient: hand it a copy, "
            "logits = outputs.logits.clone()"
        )


def _whole_backward(ctx: Any, hidden: Tensor, gradient: Tensor, wanted: bool) -> Tensor | None:
    """Compute the gradients of weight and bias, for the engine; return that of hidden (..., H)
    where it is wanted."""
    call: HeadCall = ctx.call
    unit, (for_weight, for_bias) = call.unit, call.trained()
    linear: Any = unit.module
    context = begin_backward(ctx)
    sums: list[tuple[Any, Tensor]] = []
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
            sums.append((linear.weight, total))
        if for_bias:
            sums.append((bias, slopes.sum(0, dtype=torch.float32)))
    for parameter, total in sums:
        group, member = next(pair for pair in unit.members if pair[1].parameter is parameter)
        context.gradients_of(group).add(group, member, total)
    end_backward(context, unit)
    return found
