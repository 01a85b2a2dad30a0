"""The loss of a head that is more than one linear layer, such as one with adapters beside it.

Its own forward computes the logits of a chunk of tokens, and autograd the gradients of what is
trained in it; they are added up in fp32 over the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.head.call import HeadCall
from fluxtrain.core.head.steps import after
from fluxtrain.core.runtime.passes import begin_backward, bound, end_backward
from fluxtrain.plan.heads import LOGITS_CHUNK_BYTES

_COPIES = 6  # of a chunk's logits in fp32 that autograd and the steps hold


def loss_of_module(call: HeadCall, hidden: Tensor, for_hidden: bool) -> Tensor:
    """Compute the loss (0-d fp32) for hidden (N, H) and, in `call`, the gradients that are wanted.
    The module's parameters are on the device."""
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
