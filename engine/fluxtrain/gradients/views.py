"""Views of the members' ranges of flat gradient tensors, and operations over them."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member, Segment


class MemberViews:
    """Views of the members' ranges, made once: a slice and a view for each parameter of a block
    cost the thread that queues its backward pass more than a copy does."""

    def __init__(self) -> None:
        self._made: dict[tuple[Segment, int], list[Tensor]] = {}  # they hold what they are views of

    def of(self, segment: Segment, flat: Tensor) -> list[Tensor]:
        """Return the ranges of the segment's members, in their order and shapes, of `flat`
        (elements,), which must be memory that is used again and again: views are kept."""
        key = segment, flat.data_ptr()
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = [member.slice(flat) for member in segment.members]
        return found

    def forget(self) -> None:
        """Drop all views, since some of their memory is freed."""
        self._made.clear()


def copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each (to, source), all `to` of one dtype; in one launch if the sources are of one dtype
    too: for mixed lists torch's fused copy took the first tensor's (pytorch/pytorch#173383)."""
    if len({source.dtype for _, source in copies}) == 1:
        torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
        return
    for to, source in copies:
        to.copy_(source)


def norms_of(views: list[Tensor], group: Group) -> Tensor:
    """Return the 2-norms (views,) in fp32 of rounded gradients of the group.

    Their memory is taken first and as one: scalars made beside the norm's own temporaries would
    keep malloc from reusing those (a quarter of a gigabyte for a model of 0.2 on CPU).
    """
    if group.by_rows:
        return torch.stack([norm_by_rows(view).squeeze(0) for view in views])
    norms = torch.empty(len(views), dtype=torch.float32, device=views[0].device)
    for view, norm in zip(views, norms.unbind(), strict=True):
        torch.linalg.vector_norm(view, dtype=torch.float32, out=norm)
    return norms


def norm_by_rows(
    values: Tensor, places: Tensor | None = None, table_rows: int | None = None
) -> Tensor:
    """Return the 2-norm (1,) in fp32 of (U, H), from the norm of each row.

    `places` (U,) are the rows' positions in an embedding of `table_rows` rows whose other rows are
    zero; the result has the bits of the norm over all of it.
    """
    norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32)
    if places is not None and table_rows is not None:
        norms = torch.zeros(table_rows, device=norms.device).index_copy_(0, places, norms)
    whole: Tensor = torch.linalg.vector_norm(norms)
    return whole.view(1)


def stored(member: Member) -> Tensor:
    """Return the member's gradient as stored in its group's memory (its scale not applied), in its
    shape."""
    return member.slice(member.segment.gradient)


def apply_scales(members: list[Member]) -> None:
    """Multiply recorded scales into the stored gradients."""
    for member in members:
        if member.has_gradient and member.gradient_scale != 1.0:
            stored(member).mul_(member.gradient_scale)
        member.gradient_scale = 1.0


def widen_stored(group: Group) -> None:
    """Convert the group's stored gradients to fp32 with their scales applied, to add to them."""
    for segment in group.trained:
        apply_scales(segment.members)
        group.widen_gradient(segment)


def round_stored(group: Group) -> None:
    """Convert the group's stored gradients back to the weights' dtype, for optimizers that want
    gradients like their parameters."""
    for segment in group.trained:
        if segment.is_wide and segment.rounded is not None:
            segment.rounded.copy_(segment.gradient)
            segment.is_wide = False
