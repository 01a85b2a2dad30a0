"""Gradients as the user's code sees them: `parameter.grad`, read, written and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fluxtrain.errors import MisusedModel
from fluxtrain.gradients.views import norms_of, stored

if TYPE_CHECKING:
    from fluxtrain.memory.group import Group
    from fluxtrain.memory.segment import Member
    from fluxtrain.stream.engine import Engine


def lend(engine: Engine, group: Group, member: Member) -> Tensor:
    """Where the gradient is stored, and may still be on its way to: who only asks whether there is
    one, as `zero_grad` does for every parameter, must not wait for the whole backward pass.

    Raises MisusedModel where an eager step used it up.
    """
    if group.rows is not None:  # those on their way would be given up with the gradient
        engine.gradients.host.wait(group)
    if not group.holds_gradient_memory:
        raise MisusedModel(
            f"the gradient of {member.name} in {group.name} was used up: in an eager step each "
            "group is updated as its gradients arrive, and their memory serves the next group. "
            "optimizer.step() ends the step"
        )
    return stored(member)


def settle(engine: Engine, group: Group, member: Member) -> None:
    """Somebody is about to look at (or write to) the stored gradient itself."""
    engine.gradients.host.wait(group)
    engine.gradients.host.take_rows(group)
    group.wait()  # an update under way reads it
    if member.gradient_scale != 1.0 and member.has_gradient:
        stored(member).mul_(member.gradient_scale)
    member.gradient_scale = 1.0
    arrival = engine.gradients.host.arrivals.get(group)
    if arrival is not None:
        arrival.norm_of.pop(member.index, None)


def show(engine: Engine, group: Group, member: Member) -> None:
    """The same by somebody who keeps what was lent, and may write to it again without a trace."""
    settle(engine, group, member)
    engine.gradients.host.handed_out(member)


def replace(engine: Engine, group: Group, member: Member, value: Tensor | None) -> None:
    """The gradient is `value` from now on; None: there is none."""
    if value is None:
        member.has_gradient = False
        member.gradient_scale = 1.0
        if not group.has_gradient:
            engine.gradients.host.forget(group)
        return
    if engine.eager is not None:
        engine.eager.refuse_updated([group])
    engine.gradients.host.keep_memory(group)
    settle(engine, group, member)
    with torch.no_grad():
        stored(member).copy_(value)
    member.has_gradient = True


def norm_of(engine: Engine, group: Group, member: Member) -> Tensor:
    """2-norm of one parameter's gradient, fp32 scalar."""
    arrival = engine.gradients.host.arrivals.get(group)
    if arrival is not None and arrival.norms is not None and member.index in arrival.norm_of:
        norm = arrival.norms[arrival.norm_of[member.index]]
        scale = abs(member.gradient_scale)
        return norm if scale == 1.0 else norm * scale
    engine.gradients.host.wait(group)
    return norms_of([lend(engine, group, member)], group)[0] * abs(member.gradient_scale)
