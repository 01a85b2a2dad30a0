"""The lookup of an embedding whose weight stays on the host: only rows cross the bus.

The host finds the distinct ids of a batch and gathers their rows. These are copied to the device,
where each token looks up its row by position. torch computes the gradient over these rows alone:
positions ascend as ids do, so each row's terms are summed in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.core.cards.on_card import backward_on_card, forward_on_card
from fluxtrain.core.device.page_locks import host_empty
from fluxtrain.core.gradients.row_sum import RowSum
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.rows import Places, RowBuffers, UploadedRows
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import (
    UnitCall,
    begin_backward,
    end_backward,
    end_forward,
    record,
)

Hook = Callable[[Tensor], Tensor | None]
_IDS = (torch.int64, torch.int32)


def choose_rows(context: Context) -> None:
    """Look up by rows each embedding for which the placement says so."""
    for unit in context.units:
        group = unit.group
        if not group.members or "rows" not in group.placement.transfers:
            continue
        if not can_look_up_rows(unit):
            context.say("no embedding is looked up by rows: its weight has hooks")
            continue
        table_rows, width = group.members[0].shape
        group.rows = RowBuffers(context.device, table_rows, width, group.members[0].segment.dtype)


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether the module is an embedding whose rows can be looked up a few at a time."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    own = "_fluxtrain_forward" if "_fluxtrain_unit" in module.__dict__ else "forward"
    plain = not module._parameters.keys() - {"weight"} and own not in module.__dict__
    exotic = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return plain and not exotic and not hasattr(module, "parametrizations")


def can_look_up_rows(unit: Unit) -> bool:
    """Return whether the unit is such an embedding and no hook watches its weight."""
    looked_at = torch.is_grad_enabled() and _hooks_of(unit.group.members[0].parameter)
    with torch._C.DisableTorchFunctionSubclass():  # no read that would wait for an update
        return is_plain_embedding(unit.module) and not looked_at


def _hooks_of(weight: nn.Parameter) -> list[Hook]:
    """Return the hooks that `weight.register_hook` was given."""
    with torch._C.DisableTorchFunctionSubclass():
        return list((weight._backward_hooks or {}).values())


def look_up(
    context: Context, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the embedding (..., H) of the ids among the arguments.

    None where rows are impossible: from then on the whole weight is copied to the device.
    Arguments that `nn.Embedding` refuses raise as in torch.
    """
    if not can_look_up_rows(unit):
        _copy_whole(context, unit, "its weight has hooks, or its options were changed")
        return None
    given = (*args, *kwargs.values())
    if len(given) != 1 or not set(kwargs) <= {"input"}:
        nn.Embedding.forward(unit.module, *args, **kwargs)  # type: ignore[arg-type]  # raises
    ids = given[0]
    if not isinstance(ids, Tensor) or ids.dtype not in _IDS:
        torch.embedding(torch.empty(1, 1), ids)  # raises
    if type(ids) is not Tensor or ids.dtype not in _IDS:
        _copy_whole(context, unit, "it is called with something else than ids")
        return None
    call = Lookup(context, unit, ids)
    if torch.is_grad_enabled() and unit.group.members[0].parameter.requires_grad:
        assert unit.group.rows is not None
        unit.group.rows.awaited.add(call)
        found: Tensor = _LookedUp.apply(call, context.anchor)  # type: ignore[no-untyped-call]
        return found
    with torch.no_grad():
        return call.forward()


def passes_in_parts(context: Context, group: Group) -> bool:
    """Return whether no unit computes with the whole group at once, so that it needs no slot."""
    if any(
        unit.vocab_chunks is not None and unit.vocab_chunks.group is group for unit in context.units
    ):
        return True
    return group.rows is not None and group.by_rows


def _copy_whole(context: Context, unit: Unit, why: str) -> None:
    group = unit.group
    assert group.rows is not None
    slotless = passes_in_parts(context, group)  # otherwise the group has the head's slot
    group.rows.give_back()
    group.rows = None
    for head in context.units:
        if head.vocab_chunks is not None and head.vocab_chunks.group is group:
            head.vocab_chunks.give_back()
            head.vocab_chunks = None
    if slotless:
        context.card_of(unit).window.add_slot(group.weight_bytes, owner=group)
    context.say(f"{unit.name} is copied to the device whole: {why}")


class Lookup(UnitCall):
    """One forward of an embedding, with the tensors for its backward."""

    def __init__(self, context: Context, unit: Unit, ids: Tensor) -> None:
        super().__init__(context, unit)
        module = unit.module
        assert isinstance(module, nn.Embedding)
        self.shape = ids.shape
        self.places = Places.of(_on_host(context, ids).reshape(-1))
        self.padding_row = -1 if module.padding_idx is None else module.padding_idx
        self.padding = self.places.position_of(self.padding_row)
        self.uploaded: UploadedRows | None = None  # without the rows themselves

    def forward(self) -> Tensor:
        """Look the rows up and return them, (..., H)."""
        unit, context, group = self.unit, self.context, self.unit.group
        buffers = group.rows
        assert buffers is not None
        uploaded, transfers = buffers.upload(self.places, self._gather)
        context.use.begin()
        try:
            for transfer in transfers:
                transfer.wait_compute("weights")
            context.counters.uploaded(group, "demand", transfers[1], uploaded.rows.nbytes)
            start = context.device.recorder.instant()
            # in the shape of the ids, so that the result is no view
            ids = uploaded.of_tokens.view(self.shape)
            found = torch.embedding(uploaded.rows, ids, self.padding)
            self.uploaded = UploadedRows(
                uploaded.rows[:0], uploaded.places.clone(), uploaded.of_tokens.clone()
            )
            context.device.recorder.computed("forward", unit.name, start)
        finally:
            context.use.end()
            buffers.release()
        end_forward(context, unit)
        return found

    def _gather(self, rows: Tensor, into: Tensor) -> None:
        """Copy the up-to-date weights of rows (U,) into (U, H); book the wait for an update as a
        stall."""
        context, group = self.context, self.unit.group
        waits, started_s = group.jobs.pending is not None, time.perf_counter()
        group.jobs.wait_for_weights()
        torch.index_select(group.memory.views[0], 0, rows, out=into)
        if waits:
            context.device.stalls.add_host("update", time.perf_counter() - started_s)

    def backward(self, gradient: Tensor) -> None:
        """Compute the rows' gradient, for the engine."""
        context, group = self.context, self.unit.group
        buffers, uploaded, member = group.rows, self.uploaded, group.members[0]
        assert uploaded is not None
        if buffers is not None:
            buffers.awaited.discard(self)
        flat, dense = gradient.reshape(-1, member.shape[1]), torch.ops.aten.embedding_dense_backward
        hooks = _hooks_of(member.parameter)  # they may have come after the forward
        if hooks or buffers is None or buffers.capacity < self.places.count:
            where = uploaded.places[uploaded.of_tokens]
            values = dense(flat, where, member.shape[0], self.padding_row, False)
            for hook in hooks:
                changed = hook(values)
                values = values if changed is None else changed
            context.gradients_of(group).add(group, member, values)
            return
        values = dense(flat, uploaded.of_tokens, buffers.capacity, self.padding, False)
        rows = RowSum(self.places, uploaded.places, values[: self.places.count])
        context.gradients_of(group).add_rows(group, rows)


class _LookedUp(torch.autograd.Function):
    @staticmethod
    @forward_on_card
    def forward(ctx: Any, call: Lookup, anchor: Tensor) -> Tensor:
        record(ctx, call)
        ctx.set_materialize_grads(False)
        return call.forward()

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        call: Lookup = ctx.call
        context = begin_backward(ctx)
        if gradient is not None:
            call.backward(gradient)
        end_backward(context, call.unit)
        return None, None


def _on_host(context: Context, ids: Tensor) -> Tensor:
    """Return the ids (any shape) in host memory. Where only the device has them, this thread waits
    until the computation queued so far has computed them."""
    known = context.host_ids.of(ids)
    if known is not None or ids.device.type == "cpu":
        return ids if known is None else known
    host = host_empty(ids.shape, ids.dtype, pin=context.device.pins)
    context.device.download(host, ids.contiguous()).wait_host()
    return host
