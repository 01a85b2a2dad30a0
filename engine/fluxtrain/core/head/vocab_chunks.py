"""The last linear layer in vocabulary chunks: the device holds at most two chunks of its weight.

The loss needs each chunk twice. The forward pass collects each token's log of the softmax's sum and
its target's logit. The backward pass computes the logits again and the slopes from them, adds up
the gradient of the hidden states in fp32, and downloads each chunk's weight gradient before the
next. Code that reads the logits themselves gets them, computed chunk by chunk as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.core.cards.on_card import backward_on_card, forward_on_card
from fluxtrain.core.head.call import HeadCall
from fluxtrain.core.head.steps import pull_back
from fluxtrain.core.head.token_loss import (
    FusedLogits,
    HeadGradients,
    PlainLogits,
    SoftmaxSums,
    VocabRange,
    add_product_,
    logits_of,
    scaled,
    spans,
)
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.memory.vocab_chunks import ChunkedWeights
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import begin_backward, end_backward, end_forward, record
from fluxtrain.errors import MisusedModel
from fluxtrain.plan.heads import vocab_chunk_rows

Slope = Callable[[Tensor, VocabRange, slice], Tensor]  # hidden (n, H), chunk, tokens -> (n, w)


def choose_vocab_chunks(context: Context) -> None:
    """Upload the head's weight in vocabulary chunks where the placement says so."""
    if not any("vocabulary_chunks" in row.transfers for row in context.plan.groups):
        return
    unit = next((unit for unit in context.units if _comes_apart(unit)), None)
    if unit is None:
        context.say(
            "no head comes in vocabulary chunks: none is known whose weight can be cut apart"
        )
        return
    linear: Any = unit.module
    by_parameter = {id(member.parameter): member for _, member in unit.members}
    biases = [] if linear.bias is None else [by_parameter[id(linear.bias)]]
    weight, group = by_parameter[id(linear.weight)], unit.group_of_weight()
    rows = vocab_chunk_rows(weight.shape[1] * weight.segment.dtype.itemsize, weight.shape[0])
    unit.vocab_chunks = ChunkedWeights(
        context.device, group, [weight, *biases], rows, context.counters.uploaded
    )
    if group.users > 1:
        context.updates.first_to_arrive = group


def _comes_apart(unit: Unit) -> bool:
    """Return whether only this head uses its weight, or also an embedding looked up by rows."""
    if not unit.is_linear_head:
        return False
    if not unit.borrowed:
        return unit.group.users == 1
    (group, *others) = unit.borrowed
    tied = group.rows is not None and group.users == 2
    return tied and not others and not unit.group.members


def vocab_chunked_loss(call: HeadCall, hidden: Tensor) -> Tensor:
    """Compute the cross entropy (0-d fp32) of a head in vocabulary chunks for hidden (N, H)."""
    anchor = call.context.anchor
    loss: Tensor = _VocabChunkedLoss.apply(call, anchor, hidden)  # type: ignore[no-untyped-call]
    return loss


def vocab_chunked_logits(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Compute the head's output (..., V) for its arguments.

    None where chunks are impossible: the whole head then has a slot on the device.
    """
    hooked = any(m.parameter._backward_hooks for _, m in unit.members)
    if hooked and torch.is_grad_enabled():
        copy_whole(context, unit, "its weight has hooks")
        return None
    if torch.is_autocast_enabled(context.device.torch_device.type):
        copy_whole(context, unit, "it is called under autocast")
        return None
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
        copy_whole(context, unit, "it is called with something else than hidden states")
        return None
    call = HeadCall(context, unit, args[0], 0, "sum", args[0].dtype)
    logits: Tensor = _VocabChunkedLogits.apply(call, context.anchor, args[0])  # type: ignore[no-untyped-call]
    return logits


def copy_whole(context: Context, unit: Unit, why: str) -> None:
    """Copy the head to the device whole from now on, while it computes."""
    chunks = unit.vocab_chunks
    assert chunks is not None
    chunks.give_back()
    unit.vocab_chunks = None
    context.card_of(unit).window.add_slot(chunks.group.weight_bytes, owner=chunks.group)
    context.say(f"{unit.name} is copied to the device whole, not in vocabulary chunks: {why}")


class _VocabChunkedLoss(torch.autograd.Function):
    @staticmethod
    @forward_on_card
    def forward(ctx: Any, call: HeadCall, anchor: Tensor, hidden: Tensor) -> Tensor:
        context = record(ctx, call)
        target, count, wrong = call.targets()
        sums = SoftmaxSums.of(target)
        chunks = _vocab_chunks(call.unit)
        with _computing(context, call.unit, "head"):
            logits = _logits_of(call, hidden)
            for chunk in _each(chunks, range(chunks.count)):
                for rows in spans(len(hidden), logits.tokens):
                    some, known = hidden[rows].detach(), sums.cut(rows)
                    logits.compute(some, chunk, known, collect=True, scale=None)
        end_forward(context, call.unit)
        ctx.save_for_backward(hidden)
        ctx.sums, ctx.count = sums, count
        loss: Tensor = (sums.losses().sum() / count).masked_fill(wrong, torch.nan)
        return loss

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, Tensor | None]:
        call: HeadCall = ctx.call
        (hidden,) = ctx.saved_tensors
        _begin_backward(ctx)
        slope_scale = call.slope_scale(ctx.count, _vocab_chunks(call.unit).members[0].segment.dtype)
        if call.kept_scale is not None:
            scale = scale * call.kept_scale
        logits = _logits_of(call, hidden)

        def slope(inner: Tensor, chunk: VocabRange, rows: slice) -> Tensor:
            known = ctx.sums.cut(rows)
            found = logits.compute(inner, chunk, known, collect=False, scale=slope_scale)
            assert found is not None
            return found

        wanted = ctx.needs_input_grad[2]
        return None, None, _backward(call, hidden, wanted, scale, logits.tokens, slope)


class _VocabChunkedLogits(torch.autograd.Function):
    @staticmethod
    @forward_on_card
    def forward(ctx: Any, call: HeadCall, anchor: Tensor, hidden: Tensor) -> Tensor:
        context = record(ctx, call)
        chunks = _vocab_chunks(call.unit)
        out: Tensor | None = None  # (..., V)
        with _computing(context, call.unit, "head"):
            for chunk in _each(chunks, range(chunks.count)):
                found = nn.functional.linear(hidden, chunk.weight, chunk.bias)
                if out is None:
                    out = found.new_empty((*found.shape[:-1], chunks.members[0].shape[0]))
                out[..., chunk.columns] = found
        assert out is not None
        end_forward(context, call.unit)
        ctx.save_for_backward(hidden)
        return out

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None]:
        (hidden,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2]
        found = vocab_chunked_logits_backward(ctx, hidden, gradient, wanted)
        return None, None, found


def vocab_chunked_logits_backward(
    ctx: Any, hidden: Tensor, gradient: Tensor, wanted: bool
) -> Tensor | None:
    """Compute the gradients of the weights, for the engine, from that of the logits (..., V).
    Return that of hidden (..., H) where it is wanted."""
    _begin_backward(ctx)
    call: HeadCall = ctx.call
    slopes = gradient.reshape(-1, gradient.shape[-1])
    flat = hidden.reshape(-1, hidden.shape[-1])

    def slope(inner: Tensor, chunk: VocabRange, rows: slice) -> Tensor:
        found = slopes[rows, chunk.columns]
        if call.steps:
            product = nn.functional.linear(inner, chunk.weight, chunk.bias).to(call.dtype)
            found = pull_back(call.steps, product, found, chunk.columns)
        return found.to(hidden.dtype)

    one = torch.ones((), device=gradient.device)
    found = _backward(call, flat, wanted, one, max(1, len(flat)), slope)
    return None if found is None else found.view(hidden.shape)


def _begin_backward(ctx: Any) -> None:
    call: HeadCall = ctx.call
    begin_backward(ctx)
    if call.unit.vocab_chunks is None:
        raise MisusedModel(
            f"{call.unit.name} was used in a way between its forward and its backward pass that "
            "needs all of it on the device: compute the loss again"
        )
    if any(m.parameter._backward_hooks for _, m in call.unit.members):
        raise MisusedModel(
            f"a hook was registered on a weight of {call.unit.name} between forward and backward: "
            "register it before the forward pass"
        )


def _backward(
    call: HeadCall, hidden: Tensor, for_hidden: bool, scale: Tensor, most: int, slope_of: Slope
) -> Tensor | None:
    """Compute the gradients of the weights times `scale` (0-d fp32), for the engine, by vocabulary
    chunk; return that of hidden (N, H) where it is wanted. `most`: tokens at a time."""
    context, unit, chunks = call.context, call.unit, _vocab_chunks(call.unit)
    for_weight, for_bias = call.trained()
    for_all: Tensor | None = None  # (N, H)
    if for_hidden:
        for_all = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    zeros = context.card_of(unit).gradients.zeros_for_chunk
    with _computing(context, unit, "backward"):
        for chunk in _each(chunks, reversed(range(chunks.count))):
            own = HeadGradients()
            if for_weight:
                own.weight = zeros(chunk.weight.shape)
            if for_bias:
                own.bias = torch.zeros(len(chunk.weight), device=hidden.device)
            for rows in spans(len(hidden), most):
                inner = hidden[rows].detach()
                slope = slope_of(inner, chunk, rows)  # (n, w)
                if for_all is not None:
                    add_product_(for_all[rows], slope, chunk.weight)
                own.add(slope, inner)
            for member, total in zip(chunks.members, (own.weight, own.bias), strict=False):
                if total is not None:
                    _add(context, chunks, member, chunk.first, total.mul_(scale))
    end_backward(context, unit)
    return None if for_all is None else scaled(for_all, scale, hidden.dtype)


def _add(
    context: Context, chunks: ChunkedWeights, member: Member, first: int, values: Tensor
) -> None:
    """Give the engine a member's gradient of one chunk, (n, ...) in fp32, from row `first` on."""
    group, in_backward = chunks.group, context.step_in_backward
    passing = in_backward is not None and in_backward.uses_up_now(group)
    context.gradients_of(group).add_vocab_chunk(
        group, member, first, values, rows=chunks.rows, passing=passing
    )


def _vocab_chunks(unit: Unit) -> ChunkedWeights:
    assert unit.vocab_chunks is not None, "the head is whole"
    return unit.vocab_chunks


def _each(chunks: ChunkedWeights, order: Iterable[int]) -> Iterator[VocabRange]:
    """Yield the chunks in this order while the next one is copied; each is valid until the next."""
    indices = list(order)
    for index, following in zip(indices, [*indices[1:], -1], strict=True):
        weight, *biases = chunks.take(index)
        try:
            chunks.prefetch(following)
            yield VocabRange(
                weight=weight,
                bias=biases[0] if biases else None,
                first=chunks.span(index).start,
            )
        finally:
            chunks.release(index)


def _logits_of(call: HeadCall, hidden: Tensor) -> PlainLogits | FusedLogits:
    chunks = _vocab_chunks(call.unit)
    weights, most = chunks.members[0].segment.dtype, call.context.head_tokens
    return logits_of(hidden, weights, call.dtype, chunks.rows, most, call.steps)


@contextmanager
def _computing(context: Context, unit: Unit, does: str) -> Iterator[None]:
    """Record the computation inside the context in the timeline as `does`."""
    context.use.begin()
    try:
        start = context.device.recorder.instant()
        yield
        context.device.recorder.computed(does, unit.name, start)
    finally:
        context.use.end()
