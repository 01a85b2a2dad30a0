"""Move a group that trains to other tiers: weights, states and gradients as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fluxtrain.device.arena import aligned
from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import MASTERS, SCALES, Segment
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.units import bytes_text

_GRADIENTS = ("rounded", "wide")
_HELD = (*MASTERS, "m", "v", *SCALES, *_GRADIENTS)


def moves(group: Group, placement: GroupPlacement) -> bool:
    """Do weights, states or gradients of `group` change their tier for `placement`?"""
    now = group.placement
    before = (now.weights, now.state, now.gradients)
    return before != (placement.weights, placement.state, placement.gradients)


def prepare_move(group: Group, placement: GroupPlacement, *, pin: bool) -> Callable[[], None]:
    """Take the memory for `group` where `placement` has it; calling what is returned moves the
    group there and cannot fail.

    Its updates must be done, its gradients have arrived, and nothing compute with it. Every bit
    stays. pin: host memory that a GPU copies from. Raises DoesNotFit; the group is as it was.
    """
    shell = Group(group.name, group.kind)
    shell.placement, shell._device, shell._pin = placement, group._device, pin
    try:
        whole, weights = shell.allocate_weights(group.segments, group.weight_bytes, pin=pin)
        held = [_held(shell, segment) for segment in group.segments]
    except (torch.OutOfMemoryError, MemoryError) as error:
        need = group.weight_bytes + group.state_bytes + group.gradient_bytes
        raise DoesNotFit(f"{bytes_text(need)} of {group.name} find no room: {error}") from error

    def move() -> None:
        assert group.flat_weights is not None
        with torch.no_grad():
            whole[: group.weight_bytes].copy_(group.flat_weights[: group.weight_bytes])
            for segment, flat, tensors in zip(group.segments, weights, held, strict=True):
                segment.weights = flat
                for name, fresh in tensors.items():
                    fresh.copy_(getattr(segment, name))
                    setattr(segment, name, fresh)
        group.flat_weights, group.placement = whole, placement
        group._arenas, group._pin = shell._arenas, pin
        group.weights_changed(frozen=True)
        _point_there(group)

    return move


def _held(shell: Group, segment: Segment) -> dict[str, Tensor]:
    """Take memory for each tensor that the segment has beside its weights."""
    fresh: dict[str, Tensor] = {}
    for name in _HELD:
        flat: Tensor | None = getattr(segment, name)
        if flat is not None:
            is_gradient = name in _GRADIENTS
            tier = shell.placement.gradients if is_gradient else shell.placement.state
            span = [(flat.dtype, flat.numel(), 0)]
            pin = shell._pin and is_gradient
            fresh[name] = shell.allocate(tier, aligned(flat.nbytes), span, pin=pin)[1][0]
    return fresh


def _point_there(group: Group) -> None:
    """Make the weights on their new tier the parameters' own data."""
    group.home_views = [group.own_view(m) for m in group.members]
    for member, view in zip(group.members, group.home_views, strict=True):
        parameter, kind = member.parameter, member.parameter.__class__
        parameter.__class__ = nn.Parameter  # a wrapped parameter at rest notes what reads its data
        parameter.data = view
        parameter.__class__ = kind
        member.write_version = parameter._version
        member.fingerprint = None
