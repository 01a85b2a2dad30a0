"""Gradients as the user's code sees them: `parameter.grad` is read, written and measured."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.core.gradients.gradients import norms_of
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.packed import without_values
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.runtime.context import Context
from fluxtrain.errors import MisusedModel


def stored_gradient(context: Context, group: Group, member: Member) -> Tensor:
    """Return the memory of a stored gradient, without waiting for its download: `zero_grad` looks
    at `.grad` of every parameter and must not wait for the whole backward pass.

    Raises MisusedModel when a step in backward has used the gradient up.
    """
    if group.rows is not None:  # their downloads would be dropped with the gradient
        context.gradients_of(group).host.wait(group)
    if group.is_on("disk", "gradients"):
        return without_values(member.shape, member.segment.dtype)
    if not group.memory.holds_gradients:
        raise MisusedModel(
            f"the gradient of {member.name} in {group.name} was used up: in a step in backward "
            "each group is updated as its gradients arrive, and their memory serves the next "
            "group. optimizer.step() ends the step"
        )
    return member.gradient


def _refuse_on_disk(group: Group, member: Member) -> None:
    if group.is_on("disk", "gradients"):
        raise MisusedModel(
            f"the gradient of {member.name} in {group.name} lives on disk: it can be clipped by "
            "its norm or dropped, and no other code can read or write it"
        )


def resolve(context: Context, group: Group, member: Member) -> None:
    """Bring the stored gradient up to date before code reads it or writes to it. Raises
    MisusedModel for one on disk."""
    _refuse_on_disk(group, member)
    context.gradients_of(group).host.wait(group)
    context.gradients_of(group).host.take_rows(group)
    group.jobs.wait()  # an update under way reads it
    if member.gradient_scale != 1.0 and member.has_gradient:
        member.gradient.mul_(member.gradient_scale)
    member.gradient_scale = 1.0
    arrival = context.gradients_of(group).host.arrivals.get(group)
    if arrival is not None:
        arrival.norm_of.pop(member.index, None)


def hand_out(context: Context, group: Group, member: Member) -> None:
    """Resolve the gradient for code that keeps the tensor, and may write to it later unnoticed."""
    resolve(context, group, member)
    context.gradients_of(group).host.handed_out(member)


def replace(context: Context, group: Group, member: Member, value: Tensor | None) -> None:
    """Make `value` the gradient; None: drop it."""
    if value is None:
        context.gradients_of(group).host.drop(group, member)
        return
    _refuse_on_disk(group, member)
    if context.step_in_backward is not None:
        context.step_in_backward.refuse_updated([group])
    context.gradients_of(group).host.keep_memory(group)
    resolve(context, group, member)
    with torch.no_grad():
        member.gradient.copy_(value)
    member.has_gradient = True


def norm_of(context: Context, group: Group, member: Member) -> Tensor:
    """Return the 2-norm of one parameter's gradient, an fp32 scalar."""
    arrival = context.gradients_of(group).host.arrivals.get(group)
    norms = None if arrival is None else arrival.measured()
    if arrival is not None and norms is not None and member.index in arrival.norm_of:
        norm = norms[arrival.norm_of[member.index]]
        scale = abs(member.gradient_scale)
        return norm if scale == 1.0 else norm * scale
    _refuse_on_disk(group, member)
    context.gradients_of(group).host.wait(group)
    return norms_of([stored_gradient(context, group, member)], group)[0] * abs(
        member.gradient_scale
    )


def named_norm_parts(context: Context) -> list[tuple[str, Tensor]]:
    """List 2-norms (scalars or vectors) whose squares add up to the square of the global norm, with
    the names of their groups, in the order of the forward pass."""
    parts: list[tuple[str, Tensor]] = []
    for group in context.groups:
        members = [m for m in group.members if m.has_gradient]
        arrival = context.gradients_of(group).host.arrivals.get(group)
        whole = arrival.measured() if arrival is not None and arrival.is_of(members) else None
        if whole is not None and all(m.gradient_scale == 1.0 for m in members):
            parts.append((group.name, whole))
        else:
            parts += [(group.name, norm_of(context, group, m)) for m in members]
    for parameter in context.loose:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            parts.append(("a parameter outside of all blocks", norm))
    return parts


def on_one_device(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the parts on `device`, in their order: those of another device in one copy."""
    there: dict[torch.device, list[int]] = {}
    for place, part in enumerate(parts):
        there.setdefault(part.device, []).append(place)
    found = list(parts)
    for other, places in there.items():
        if other != device:
            together = torch.cat([parts[place].reshape(-1) for place in places]).to(device)
            sizes = [parts[place].numel() for place in places]
            for place, part in zip(places, together.split(sizes), strict=True):
                found[place] = part
    return found
