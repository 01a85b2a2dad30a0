"""Another home for a group that trains: weights, states and gradients move as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fluxtrain.device.arena import aligned
from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.group import Group, Home
from fluxtrain.memory.segment import MASTERS, SCALES, Segment
from fluxtrain.units import bytes_text

_HELD = (*MASTERS, "m", "v", *SCALES, "rounded", "wide")


def new_home(group: Group, home: Home, *, pin: bool) -> Callable[[], None]:
    """Take the memory for `group` at `home`; what is returned moves it there and cannot fail.

    Its updates must be done, its gradients have arrived, and nothing compute with it. Every bit
    stays. pin: host memory that a GPU copies from. Raises DoesNotFit; the group is as it was.
    """
    shell = Group(group.name, group.kind)
    shell.home, shell._device, shell._pin = home, group._device, pin
    try:
        wire, weights = shell.allocate_weights(group.segments, group.wire_bytes, pin=pin)
        held = [_held(shell, segment) for segment in group.segments]
    except (torch.OutOfMemoryError, MemoryError) as error:
        need = group.wire_bytes + group.state_bytes + group.gradient_bytes
        raise DoesNotFit(f"{bytes_text(need)} of {group.name} find no room: {error}") from error

    def move() -> None:
        assert group.wire is not None
        with torch.no_grad():
            wire[: group.wire_bytes].copy_(group.wire[: group.wire_bytes])
            for segment, flat, tensors in zip(group.segments, weights, held, strict=True):
                segment.weights = flat
                for name, fresh in tensors.items():
                    fresh.copy_(getattr(segment, name))
                    setattr(segment, name, fresh)
        group.wire, group.home, group._arenas, group._pin = wire, home, shell._arenas, pin
        group.version += 1
        _point_there(group)

    return move


def _held(shell: Group, segment: Segment) -> dict[str, Tensor]:
    """Memory at the new home for each tensor that the segment has beside its weights."""
    fresh: dict[str, Tensor] = {}
    for name in _HELD:
        flat: Tensor | None = getattr(segment, name)
        if flat is not None:
            pin = shell._pin and name in ("rounded", "wide")
            span = [(flat.dtype, flat.numel(), 0)]
            fresh[name] = shell._allocate(aligned(flat.nbytes), span, pin=pin)[1][0]
    return fresh


def _point_there(group: Group) -> None:
    """The parameters' own data are the weights at the new home."""
    group.home_views = [group.own_view(member) for member in group.members]
    for member, view in zip(group.members, group.home_views, strict=True):
        parameter, kind = member.parameter, member.parameter.__class__
        parameter.__class__ = nn.Parameter  # a wrapped parameter at rest notes what reads its data
        parameter.data = view
        parameter.__class__ = kind
        member.write_version = parameter._version
        member.fingerprint = None
