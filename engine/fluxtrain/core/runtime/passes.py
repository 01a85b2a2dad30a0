"""The passes of a wrapped model through its units, forward and backward.

A unit's forward begins with `begin_forward`, has its weights on the device inside of `bound`, and
ends with `end_forward`. A forward with gradients is a node with a `UnitCall` in torch's graph. Its
backward is alike: `begin_backward`, `bound`, `end_backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fluxtrain.core.device.multi_gpu_streams import Joins
from fluxtrain.core.guards.writes import check_writes
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context, Owner
from fluxtrain.core.runtime.parameter import HostParameter
from fluxtrain.core.runtime.stats import sample_peak
from fluxtrain.errors import MisusedModel


class UnitCall:
    """One forward of a unit whose backward pass may follow."""

    awaits_rows = False  # by itself, as they arrive from other cards

    def __init__(self, context: Context, unit: Unit) -> None:
        self.context = context  # kept, so that a backward pass after `unwrap` raises with a reason
        self.unit = unit
        self.training = unit.module.training
        self.joins: Joins = "now"  # what its forward waits for
        self.versions = {group: group.version for group in unit.groups}


def begin_forward(context: Context, unit: Unit) -> None:
    """Check the weights of a unit that is about to run, and start the next copies."""
    context.use.check()
    context.thread = threading.get_ident()
    context.forget_broken_pass()
    for group in unit.groups:
        check_writes(group)
    unit.check_identity()
    context.card_of(unit).ahead.reach("forward", unit, context.plan.slots_of(unit.card))


@contextmanager
def bound(context: Context, unit: Unit, does: str = "forward") -> Iterator[None]:
    """Bind the unit's parameters to the device inside the context, and to the host afterwards.

    The timeline records the computation inside the context as `does`.
    """
    taken: list[Group] = []
    card = context.card_of(unit)
    context.use.begin()
    try:
        for group in unit.groups:
            is_copied = not group.is_on("device")
            views = card.window.take(group) if is_copied else card.window.unpack(group)
            taken.append(group)
            for member in unit.members_of(group):
                parameter = member.parameter
                parameter.__class__ = nn.Parameter
                if views is not None:
                    parameter.data = views[member.index]
        start = card.device.recorder.instant()
        yield
        card.device.recorder.computed(does, unit.name, start)
    finally:
        context.use.end()
        for group in taken:
            is_copied = not group.is_on("device")
            for member in unit.members_of(group):
                if is_copied or member.segment.packed is not None:
                    member.parameter.data = group.memory.views[member.index]
                member.write_version = member.parameter._version
                member.parameter.__class__ = HostParameter
            if is_copied:
                card.window.release(group)


def end_forward(context: Context, unit: Unit) -> None:
    """Sample the memory peak and give back spare memory after a unit has run."""
    sample_peak(context)
    device = context.card_of(unit).device
    device.tidy()
    device.keep_pace()


def record(ctx: Any, call: UnitCall) -> Context:
    """Note a unit's forward in torch's graph, of which `ctx` is its node."""
    context = call.context
    ctx.call, ctx.anchor_node = call, context.anchor_node
    context.graphs.record(ctx, call.unit.groups)
    return context


def begin_backward(ctx: Any) -> Context:
    """Check what a unit's backward needs, and start the copies of the units before it."""
    call: UnitCall = ctx.call
    unit, context = call.unit, call.context
    context.use.check()
    if not torch._C._will_engine_execute_node(ctx.anchor_node):
        raise MisusedModel(
            "torch.autograd.grad and backward(inputs=...) do not reach the weights of wrapped "
            "blocks and would leave wrong gradients behind: use loss.backward()"
        )
    if call.training != unit.module.training:
        raise MisusedModel(
            f"{unit.name} was switched between train and eval after its forward pass: switch "
            "after backward()"
        )
    stale = [g.name for g, version in call.versions.items() if g.version != version]
    if stale:
        raise MisusedModel(
            f"the weights of {stale[0]} changed between forward and backward (an optimizer "
            "step, or a write to them): the gradients would be wrong. Step after backward()"
        )
    context.updates.begin_moments()
    context.expect_gradients(unit.groups)
    context.graphs.begin_backward(ctx)
    context.graphs.enter_pass(lambda: _end_pass(context))
    card = context.card_of(unit)
    card.ahead.reach("backward", unit, context.plan.slots_of(card.number))
    for group in () if unit.in_vocab_chunks else unit.groups:
        card.gradients.prefetch(group)
    return context


def end_backward(context: Context, unit: Unit) -> None:
    """Finish the gradients of a unit whose backward has run, unless other units add to them."""
    recorder = context.card_of(unit).device.recorder
    start = recorder.instant()
    for group in unit.groups:
        if group.users == 1:
            _finish(context, group)
    recorder.computed("gradients", unit.name, start)
    end_forward(context, unit)


def take_in(owner: Owner, parameter: nn.Parameter) -> None:
    """Take a gradient that autograd computed outside the blocks (a weight used by itself)."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        parameter.grad = None
    if gradient is None:
        return
    context = owner.context
    context.expect_gradients([owner.group])
    card = context.cards[owner.group.placement.card]
    with card.computing():
        card.gradients.add(owner.group, owner.member, gradient.to(card.torch_device))
        in_pass = torch._C._current_graph_task_id() >= 0
        if owner.group.users <= 1 or not in_pass:
            _finish(context, owner.group)
        if not in_pass:
            _complete(context, card.gradients.settle())
    if in_pass:
        context.graphs.enter_pass(lambda: _end_pass(context))


def _finish(context: Context, group: Group) -> None:
    """Send the group's gradients to where they are stored, unless other processes still add to
    them, and call the user's hooks."""
    gradients = context.gradients_of(group)
    if not gradients.is_open(group):
        return
    passing = context.step_in_backward is not None and context.step_in_backward.uses_up_now(group)
    if passing and gradients.sums is not None:  # its memory may be that of the group before,
        _complete(context, gradients.settle())  # whose update must be queued then
    _complete(context, gradients.finish(group, passing=passing))


def _complete(context: Context, groups: Iterable[Group]) -> None:
    """Call the user's hooks for groups whose gradients are complete, and update what may be."""
    for group in groups:
        with torch._C.DisableTorchFunctionSubclass():  # reading hooks does not read the weights
            hooked = [(m, m.parameter._post_accumulate_grad_hooks) for m in group.members]
        for member, hooks in hooked:
            for key, hook in list((hooks or {}).items()):
                if key != context.owners[group][member.index].hook_key and member.has_gradient:
                    hook(member.parameter)
        if context.step_in_backward is not None:
            context.step_in_backward.take(group)


def _end_pass(context: Context) -> None:
    """Finish the groups that several units add to, at the end of a backward pass."""
    for card in context.cards:
        card.ahead.end_pass()
        for group in card.gradients.open_groups():
            _finish(context, group)
        _complete(context, card.gradients.settle())
