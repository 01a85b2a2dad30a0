"""Gradients as the user's code sees them: `parameter.grad`, read, written and measured."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.errors import MisusedModel
from fluxtrain.gradients.views import norms_of, stored
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.runtime.context import Context


def lend(context: Context, group: Group, member: Member) -> Tensor:
    """Where the gradient is stored, and may still be on its way to: who only asks whether there is
    one, as `zero_grad` does for every parameter, must not wait for the whole backward pass.

    Raises MisusedModel where a step in backward used it up.
    """
    if group.rows is not None:  # those on their way would be given up with the gradient
        context.gradients.host.wait(group)
    if not group.holds_gradient_memory:
        raise MisusedModel(
            f"the gradient of {member.name} in {group.name} was used up: in a step in backward "
            f"each "
            "group is updated as its gradients arrive, and their memory serves the next group. "
            "optimizer.step() ends the step"
        )
    return stored(member)


def resolve(context: Context, group: Group, member: Member) -> None:
    """Somebody is about to look at (or write to) the stored gradient itself."""
    context.gradients.host.wait(group)
    context.gradients.host.take_rows(group)
    group.wait()  # an update under way reads it
    if member.gradient_scale != 1.0 and member.has_gradient:
        stored(member).mul_(member.gradient_scale)
    member.gradient_scale = 1.0
    arrival = context.gradients.host.arrivals.get(group)
    if arrival is not None:
        arrival.norm_of.pop(member.index, None)


def show(context: Context, group: Group, member: Member) -> None:
    """The same by somebody who keeps what was lent, and may write to it again without a trace."""
    resolve(context, group, member)
    context.gradients.host.handed_out(member)


def replace(context: Context, group: Group, member: Member, value: Tensor | None) -> None:
    """The gradient is `value` from now on; None: there is none."""
    if value is None:
        member.has_gradient = False
        member.gradient_scale = 1.0
        if not group.has_gradient:
            context.gradients.host.forget(group)
        return
    if context.step_in_backward is not None:
        context.step_in_backward.refuse_updated([group])
    context.gradients.host.keep_memory(group)
    resolve(context, group, member)
    with torch.no_grad():
        stored(member).copy_(value)
    member.has_gradient = True


def norm_of(context: Context, group: Group, member: Member) -> Tensor:
    """2-norm of one parameter's gradient, fp32 scalar."""
    arrival = context.gradients.host.arrivals.get(group)
    if arrival is not None and arrival.norms is not None and member.index in arrival.norm_of:
        norm = arrival.norms[arrival.norm_of[member.index]]
        scale = abs(member.gradient_scale)
        return norm if scale == 1.0 else norm * scale
    context.gradients.host.wait(group)
    return norms_of([lend(context, group, member)], group)[0] * abs(member.gradient_scale)


def norm_parts(context: Context) -> list[Tensor]:
    """List 2-norms (scalars or vectors) whose squares sum up to that of all gradients."""
    parts: list[Tensor] = []
    for group in context.groups:
        members = [m for m in group.members if m.has_gradient]
        arrival = context.gradients.host.arrivals.get(group)
        whole = arrival.norms if arrival is not None and arrival.is_of(members) else None
        if whole is not None and all(m.gradient_scale == 1.0 for m in members):
            parts.append(whole)
        else:
            parts += [norm_of(context, group, m) for m in members]
    for parameter in context.loose:
        if parameter.grad is not None:
            parts.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
    return parts
