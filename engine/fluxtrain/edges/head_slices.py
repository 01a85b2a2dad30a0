"""The last linear layer in slices of its words: of its weight the device never holds more than two.

The loss needs them twice. The forward pass collects each token's log of the softmax's sum and its
target's logit; the backward pass computes the logits again, and with them the slopes, adds up the
gradient of the hidden states in fp32, and sends each slice's weight gradient home before the next.
Whoever asks for the logits themselves is given them, computed slice by slice as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.edges.chunk_loss import add_product_
from fluxtrain.edges.head_call import HeadCall
from fluxtrain.edges.slice_loss import Tokens, Words, slices_of
from fluxtrain.errors import MisusedModel
from fluxtrain.memory.segment import Member
from fluxtrain.memory.slices import WeightSlices
from fluxtrain.memory.unit import Unit
from fluxtrain.plan.heads import slice_words
from fluxtrain.runtime.context import Context
from fluxtrain.runtime.passes import begin_backward, end_backward, end_forward, record

_SCALED_ROWS = 4096
Slope = Callable[[Tensor, Words, slice], Tensor]  # hidden (n, H), words, which tokens -> (n, w)


def choose_slices(context: Context) -> None:
    """Let the head's weight come in slices where its row of the table says so."""
    if not any("vocabulary_chunks" in row.transfers for row in context.plan.groups):
        return
    unit = next((unit for unit in context.units if unit.is_head and _comes_apart(unit)), None)
    if unit is None:
        context.say(
            "no head comes in vocabulary chunks: none is known whose weight can be cut apart"
        )
        return
    linear: Any = unit.module
    by_parameter = {id(member.parameter): member for _, member in unit.members}
    biases = [] if linear.bias is None else [by_parameter[id(linear.bias)]]
    weight, group = by_parameter[id(linear.weight)], unit.group_of_weight()
    words = slice_words(weight.shape[1] * weight.segment.dtype.itemsize, weight.shape[0])
    unit.slices = WeightSlices(
        context.device, group, [weight, *biases], words, context.counters.uploaded
    )
    if group.users > 1:
        context.updates.first_home = group


def _comes_apart(unit: Unit) -> bool:
    """Is its weight all its own, or that of an embedding which others look up by rows?"""
    if not unit.borrowed:
        return unit.group.users == 1
    (group, *others) = unit.borrowed
    tied = group.rows is not None and group.users == 2
    return tied and not others and not unit.group.members


def sliced_cross_entropy(call: HeadCall, hidden: Tensor) -> Tensor:
    """Cross entropy (0-d fp32) of `hidden @ weight.T + bias` for hidden (N, H)."""
    anchor = call.context.anchor
    loss: Tensor = _SlicedCrossEntropy.apply(call, anchor, hidden)  # type: ignore[no-untyped-call]
    return loss


def sliced_logits(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The head's output (..., V) for its arguments; None where slices will not do: from then on the
    whole head has a place on the device."""
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
    logits: Tensor = _SlicedLogits.apply(call, context.anchor, args[0])  # type: ignore[no-untyped-call]
    return logits


def copy_whole(context: Context, unit: Unit, why: str) -> None:
    """From now on the head is on the device whole while it computes."""
    slices = unit.slices
    assert slices is not None
    slices.give_back()
    unit.slices = None
    context.window.add_slot(slices.group.wire_bytes, owner=slices.group)
    context.say(f"{unit.name} is copied to the device whole, not in vocabulary chunks: {why}")


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: HeadCall, anchor: Tensor, hidden: Tensor) -> Tensor:
        context = record(ctx, call)
        target, count, wrong = call.targets()
        tokens = Tokens.of(target)
        slices = _slices(call.unit)
        with _computing(context, call.unit, "head"):
            chunks = _chunks(call, hidden)
            for words in _each(slices, range(slices.count)):
                for rows in _spans(len(hidden), chunks.tokens):
                    chunks.collect(hidden[rows].detach(), words, tokens.cut(rows))
        end_forward(context)
        ctx.save_for_backward(hidden)
        ctx.tokens, ctx.count = tokens, count
        losses = torch.where(target >= 0, tokens.log_sums - tokens.chosen, 0.0)
        loss: Tensor = (losses.sum() / count).masked_fill(wrong, torch.nan)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, Tensor | None]:
        call: HeadCall = ctx.call
        (hidden,) = ctx.saved_tensors
        _begin_backward(ctx)
        slope_scale = call.slope_scale(ctx.count, _slices(call.unit).members[0].segment.dtype)
        if call.kept_scale is not None:
            scale = scale * call.kept_scale
        chunks = _chunks(call, hidden)

        def slope(inner: Tensor, words: Words, rows: slice) -> Tensor:
            found: Tensor = chunks.slope(inner, words, ctx.tokens.cut(rows), slope_scale)
            return found

        wanted = ctx.needs_input_grad[2]
        return None, None, _backward(call, hidden, wanted, scale, chunks.tokens, slope)


class _SlicedLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: HeadCall, anchor: Tensor, hidden: Tensor) -> Tensor:
        context = record(ctx, call)
        slices = _slices(call.unit)
        out: Tensor | None = None  # (..., V)
        with _computing(context, call.unit, "head"):
            for words in _each(slices, range(slices.count)):
                found = nn.functional.linear(hidden, words.weight, words.bias)
                if out is None:
                    out = found.new_empty((*found.shape[:-1], slices.members[0].shape[0]))
                out[..., words.first : words.first + len(words.weight)] = found
        assert out is not None
        end_forward(context)
        ctx.save_for_backward(hidden)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None]:
        (hidden,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2]
        found = sliced_logits_backward(ctx, hidden, gradient, wanted)
        return None, None, found


def sliced_logits_backward(
    ctx: Any, hidden: Tensor, gradient: Tensor, wanted: bool
) -> Tensor | None:
    """Hand the gradients of the weights to the engine, for that of the logits (..., V); that of
    hidden (..., H) where it is wanted."""
    _begin_backward(ctx)
    slopes = gradient.reshape(-1, gradient.shape[-1])
    flat = hidden.reshape(-1, hidden.shape[-1])

    def slope(inner: Tensor, words: Words, rows: slice) -> Tensor:
        return slopes[rows, words.first : words.first + len(words.weight)]

    one = torch.ones((), device=gradient.device)
    found = _backward(ctx.call, flat, wanted, one, max(1, len(flat)), slope)
    return None if found is None else found.view(hidden.shape)


def _begin_backward(ctx: Any) -> None:
    call: HeadCall = ctx.call
    begin_backward(ctx)
    if call.unit.slices is None:
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
    """Hand the gradients of the weights times `scale` (0-d fp32) to the engine, slice by slice;
    that of hidden (N, H) is returned where it is wanted. `most` tokens a chunk."""
    context, unit, slices = call.context, call.unit, _slices(call.unit)
    for_weight, for_bias = call.trained()
    sums: Tensor | None = None
    if for_hidden:
        sums = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    with _computing(context, unit, "backward"):
        for words in _each(slices, reversed(range(slices.count))):
            total = context.gradients.zeros_for_slice(words.weight.shape) if for_weight else None
            bias_total = torch.zeros(len(words.weight), device=hidden.device) if for_bias else None
            for rows in _spans(len(hidden), most):
                inner = hidden[rows].detach()
                slope = slope_of(inner, words, rows)  # (n, w)
                if sums is not None:
                    add_product_(sums[rows], slope, words.weight)
                if total is not None:
                    add_product_(total, slope.t(), inner)
                if bias_total is not None:
                    bias_total += slope.sum(0, dtype=torch.float32)
            for member, found in zip(slices.members, (total, bias_total), strict=False):
                if found is not None:
                    _add(context, slices, member, words.first, found.mul_(scale))
    end_backward(context, unit)
    return None if sums is None else _scaled(sums, scale, hidden.dtype)


def _add(
    context: Context, slices: WeightSlices, member: Member, first: int, values: Tensor
) -> None:
    """Hand over the whole gradient of the words of a member from `first` on, (n, ...) in fp32."""
    group, eager = slices.group, context.eager
    passing = eager is not None and eager.uses_up_now(group)
    context.gradients.add_slice(group, member, first, values, rows=slices.words, passing=passing)


def _scaled(sums: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """sums (N, H) fp32, in place, times the scale, in `dtype`."""
    if dtype == torch.float32:
        return sums.mul_(scale)
    found = torch.empty_like(sums, dtype=dtype)
    for to, part in zip(found.split(_SCALED_ROWS), sums.split(_SCALED_ROWS), strict=True):
        to.copy_(part.mul_(scale))
    return found


def _slices(unit: Unit) -> WeightSlices:
    assert unit.slices is not None, "the head is whole"
    return unit.slices


def _each(slices: WeightSlices, order: Iterable[int]) -> Iterator[Words]:
    """The slices in this order, each valid until the next, whose copy is under way."""
    indices = list(order)
    for index, following in zip(indices, [*indices[1:], -1], strict=True):
        weight, *biases = slices.take(index)
        try:
            slices.prefetch(following)
            yield Words(
                weight=weight,
                bias=biases[0] if biases else None,
                first=slices.span(index).start,
            )
        finally:
            slices.release(index)


def _chunks(call: HeadCall, hidden: Tensor) -> Any:
    slices = _slices(call.unit)
    weights, most = slices.members[0].segment.dtype, call.context.head_tokens
    return slices_of(weights, hidden, call.dtype, slices.words, most)


def _spans(count: int, most: int) -> list[slice]:
    """Tokens of each chunk."""
    return [slice(start, min(count, start + most)) for start in range(0, count, most)]


@contextmanager
def _computing(context: Context, unit: Unit, does: str) -> Iterator[None]:
    """The timeline calls the computation inside `does`."""
    context.use.begin()
    try:
        start = context.device.recorder.instant()
        yield
        context.device.recorder.computed(does, unit.name, start)
    finally:
        context.use.end()
