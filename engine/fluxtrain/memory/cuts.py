"""Members' ranges of flat tensors: made once where the memory stays, with their norms."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.memory.group import Group
from fluxtrain.memory.rows import norm_by_rows
from fluxtrain.memory.segment import Member, Segment


class Cuts:
    """Views of the members' ranges, made once: a slice and a view for each parameter of a block
    cost the thread that queues its backward pass more than a copy does."""

    def __init__(self) -> None:
        self._made: dict[tuple[Segment, int], list[Tensor]] = {}  # they hold what they are views of

    def of(self, segment: Segment, flat: Tensor) -> list[Tensor]:
        """The ranges of its members, in their order and shapes, of `flat` (elements,): memory that
        is used again and again, or views of all that ever was would be kept."""
        key = segment, flat.data_ptr()
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = [member.slice(flat) for member in segment.members]
        return found

    def forget(self) -> None:
        """Some of that memory is given back."""
        self._made.clear()


def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    """Each `source` to its `to` (all of one dtype), in one launch where they are of one too:
    of mixed lists torch's fused copy went by the first tensor's (pytorch/pytorch#173383)."""
    if len({one.dtype for one in source}) == 1:
        torch._foreach_copy_(to, source)
        return
    for into, one in zip(to, source, strict=True):
        into.copy_(one)


def norms_of(views: list[Tensor], group: Group) -> Tensor:
    """2-norms (views,) in fp32 of rounded gradients.

    Their memory is taken first and as one: scalars made beside the norm's own temporaries would
    keep malloc from reusing those (a quarter of a gigabyte for a model of 0.2 on CPU).
    """
    if group.by_rows:
        return torch.stack([norm_by_rows(view).squeeze(0) for view in views])
    norms = torch.empty(len(views), dtype=torch.float32, device=views[0].device)
    for view, norm in zip(views, norms.unbind(), strict=True):
        torch.linalg.vector_norm(view, dtype=torch.float32, out=norm)
    return norms


def stored(member: Member) -> Tensor:
    """The member's gradient at home, as stored (its scale not applied), in its shape."""
    return member.slice(member.segment.gradient)


def apply_scales(members: list[Member]) -> None:
    """Multiply recorded scales into the stored gradients."""
    for member in members:
        if member.has_gradient and member.gradient_scale != 1.0:
            stored(member).mul_(member.gradient_scale)
        member.gradient_scale = 1.0


def widen_at_home(group: Group) -> None:
    """What comes is added to the gradients at home, in fp32."""
    for segment in group.trained:
        apply_scales(segment.members)
        group.widen_gradient(segment)


def round_at_home(group: Group) -> None:
    """Back to the weights' dtype: for optimizers that want gradients like their parameters."""
    for segment in group.trained:
        if segment.is_wide and segment.rounded is not None:
            segment.rounded.copy_(segment.gradient)
            segment.is_wide = False
