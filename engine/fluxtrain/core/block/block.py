"""Run a unit: forward in chunks of rows, backward with recomputation.

The forward pass keeps the inputs and drops all other activations. The backward pass uploads the
weights again, recomputes each chunk as far as its gradients need it, and gives the gradients of the
weights to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fluxtrain.core.block.call import Call
from fluxtrain.core.block.capture import Capture, active_collector
from fluxtrain.core.block.chunking import Merging, chunks, spans, writes
from fluxtrain.core.block.rng import RandomState
from fluxtrain.core.block.room import give_back, halve_chunk
from fluxtrain.core.cards.on_card import backward_on_card, forward_on_card
from fluxtrain.core.device.multi_gpu_streams import Joins
from fluxtrain.core.guards.arguments import (
    Tree,
    batch_rows,
    flatten,
    has_cache,
    opaque,
    refuse_hidden_gradients,
    run_with,
    slice_rows,
    splits,
    without_caches,
)
from fluxtrain.core.guards.leaks import BoundWeights
from fluxtrain.core.guards.output_alias import CallOutputs
from fluxtrain.core.guards.shared_memory import version_of
from fluxtrain.core.memory.module_buffers import put_back
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.arrivals import ArgumentArrivals, wait_for_all
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import begin_backward, bound, end_backward, end_forward, record


def run_with_gradients(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the unit as one node of torch's graph, whose backward recomputes the unit."""
    args, kwargs = without_caches(unit.name, args, kwargs)
    tree, tensors = flatten((args, kwargs), once=True)
    refuse_hidden_gradients(unit.name, tree)
    collector = active_collector()
    joins = joins_of(context, unit, tree, tensors)
    with context.card_of(unit).computing(joins=joins, lane=unit.lane):  # it may try chunks
        call = Call(context, unit, tree, tensors, Capture.of(collector))
    call.joins = joins
    flat = _Streamed.apply(call, context.anchor, *tensors)  # type: ignore[no-untyped-call]
    out, extra = call.outputs.hand_out(flat, tensors)
    call.capture.put_back(collector, extra)
    return out


def run_without_gradients(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the unit on the whole batch, or on a chunk of rows at a time."""
    tree, tensors = flatten((args, kwargs), once=True)
    joins = joins_of(context, unit, tree, tensors)
    with context.card_of(unit).computing(joins=joins, lane=unit.lane):
        return _without_gradients(context, unit, args, kwargs, tree, tensors)


def joins_of(context: Context, unit: Unit, tree: Tree, tensors: Sequence[Tensor]) -> Joins:
    """Return how far a block's forward must wait for the code around: for all of it, where an
    argument hides tensors."""
    if len(context.cards) == 1:
        return "now"
    lane = 0 if any(opaque(tree)) else unit.lane
    return context.card_of(unit).joins_for(tensors, lane)


def _without_gradients(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], tree: Tree,
    tensors: list[Tensor],
) -> Any:  # fmt: skip
    rows = batch_rows(tensors)
    may_cut = not has_cache(args, kwargs) and active_collector() is None
    device = context.card_of(unit).device
    while True:
        cut = rows if may_cut and rows and chunks(context, unit, rows, tree, tensors) else None
        at_once = context.chunk_rows if cut else rows if may_cut else None
        before = _Before(context, unit, tree, tensors)
        try:
            with bound(context, unit), before.drawing():
                weights = BoundWeights(unit)
                if cut is None:
                    wait_for_all(device, tensors)
                    out = unit.original(*args, **kwargs)
                else:
                    out = _by_chunks(context, unit, tree, tensors, cut)
                weights.refuse_writes()
            before.forget()
            device.keep_pace()
            return out
        except torch.OutOfMemoryError as error:
            again = context.retries_blocks and before.is_restored(args, kwargs)
            halve_chunk(context, unit, at_once if again else None, error)
        give_back(device.torch_device)  # only now: the error's frames held what was computed


class _Before:
    """The state that a block without gradients may change, from before it ran."""

    def __init__(self, context: Context, unit: Unit, tree: Tree, tensors: Sequence[Tensor]) -> None:
        self._context, self._unit, self._tree, self._tensors = context, unit, tree, tensors
        self._watched = [*tensors, *(tensor for _, held in opaque(tree) for tensor in held)]
        self._versions = [version_of(tensor) for tensor in self._watched]
        self._buffers = unit.buffers_without_gradients.before(unit.module)
        self._device = context.device.torch_device
        draws = unit.module.training  # dropout
        self._random = RandomState.now(self._device, host=unit.draws_on_host) if draws else None

    def drawing(self) -> AbstractContextManager[None]:
        """Draw random numbers inside the context as a single card would."""
        card = self._context.card_of(self._unit).torch_device
        return nullcontext() if self._random is None else self._random.lend(self._device, card)

    def forget(self) -> None:
        """Note which buffers the block writes to, once it has run."""
        self._unit.buffers_without_gradients.after(self._unit.module, self._buffers)

    def is_restored(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Restore buffers and random state; False where the block wrote to an argument, so that it
        would compute something else if it ran again."""
        put_back(self._unit.module, self._buffers)
        if self._random is not None:
            self._random.restore(self._device)
        if [version_of(tensor) for tensor in self._watched] != self._versions:
            return False
        if self._tree.nests() and not self._tree.is_in((args, kwargs), self._tensors):
            return False
        if not any(tensor.is_inference() for tensor in self._watched):  # whose writes are counted
            return True
        with bound(self._context, self._unit, "probe"):
            return not writes(self._unit, self._tree, self._tensors)


def _by_chunks(
    context: Context, unit: Unit, tree: Tree, tensors: Sequence[Tensor], rows: int
) -> Any:
    """Run the unit on a chunk of rows at a time (weights bound); join the outputs. With several
    cards, the next card begins with the first rows."""
    device, split = context.card_of(unit).device, splits(tensors, rows)
    merging = Merging(device, rows, in_place=len(context.cards) > 1)
    arriving, outputs = ArgumentArrivals(device, tensors, split), CallOutputs()
    for first, stop in spans(rows, context.chunk_rows):
        arriving.wait_for(first, stop)
        inputs = slice_rows(tensors, split, first, stop)
        out, parts = flatten(run_with(unit.original, tree.fill(inputs)))
        outputs.note_chunk(out, parts, inputs)
        for place, part in enumerate(parts):
            merging.add(place, (first, stop), part)
    outputs.finish_forward()
    return outputs.hand_out([merging.take(place) for place in outputs.returned], tensors)


def _recorded(
    context: Context, call: Call, tensors: Sequence[Tensor]
) -> tuple[list[bool], Merging]:
    """Run the block of a call, with fewer rows at once where device memory runs out; return which
    results ask for gradients, and their rows."""
    unit, card = call.unit, context.card_of(call.unit)
    device = card.device
    while True:
        merging = Merging(device, call.rows, in_place=len(context.cards) > 1)
        try:
            with bound(context, unit):
                weights = BoundWeights(unit)
                differentiable = call.record(tensors, merging)
                weights.refuse_writes()
                if unit.recomputes and weights.are_referred_to():
                    call.record_again_whole()
            return differentiable, merging
        except torch.OutOfMemoryError as error:
            if not card.watch.can_evict:
                halve_chunk(context, unit, call.rows_at_once, error)
        del merging  # only now: the error's frames held what was computed
        card.watch.ran_out()
        give_back(device.torch_device)
        call.begin_again(tensors)


class _Streamed(torch.autograd.Function):
    @staticmethod
    @forward_on_card
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        context, unit = record(ctx, call), call.unit
        card = context.card_of(unit)
        ctx.set_materialize_grads(False)
        several = len(context.cards) > 1  # then inputs arrive while the first chunks compute
        offloads = unit.offloads_inputs and unit.recomputes
        if offloads and not several:
            call.given.offload(card.activation_offload, tensors)
        differentiable, merging = _recorded(context, call, tensors)
        if offloads and several:
            call.given.offload(card.activation_offload, tensors)
        end_forward(context, unit)
        call.finish_forward(tensors)
        card.watch.after_block()
        found = {i: merging.take(i) for i in call.outputs.returned}
        ctx.mark_non_differentiable(*(o for i, o in found.items() if not differentiable[i]))
        return tuple(found.values())

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        context = begin_backward(ctx)
        call: Call = ctx.call
        card = context.card_of(call.unit)
        call.given.refuse_changed()
        arriving = call.outputs.gradients_of_outputs(gradients)
        _ = ctx.saved_tensors  # none; torch refuses a second pass without retain_graph here
        tensors = call.given.fetch(card.activation_offload)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        sums: list[Tensor | None] = [None] * len(tensors)
        merging = Merging(card.device, call.rows, in_place=len(context.cards) > 1)
        with bound(context, call.unit, "backward"):
            for chunk, found in call.backward(tensors, wanted, arriving):
                merging.in_place |= chunk.is_half
                for i, gradient in zip(wanted, found, strict=True):
                    if call.given.cut[i]:
                        merging.add(i, chunk.span, gradient)
                    else:
                        so_far = sums[i]
                        sums[i] = gradient if so_far is None else so_far + gradient
        for i in wanted:
            if call.given.cut[i]:
                sums[i] = merging.take(i)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            call.given.release()
        end_backward(context, call.unit)
        call.unit.checked_recomputes += 1
        return (None, None, *sums)
