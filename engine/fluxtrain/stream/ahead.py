"""What the weights of some rows will be, before the update of their table has come to them.

AdamW of one element looks at no other, so rows can be computed from copies of their weights,
gradients and states: the bits are those that the table's own update will write. That update may
then come last, and the next forward begins with the rows it looks up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.stepping import Flat, step_on_host_, step_weights_on_host_
from fluxtrain.plan.states import STATE_BLOCK

_SLICE_ELEMENTS = 1 << 20  # copied and computed at a time


def weights_of_rows(
    flat: Flat, rows: Tensor, into: Tensor, *, hyper: Hyper, step: int, scale: float
) -> None:
    """The weights after the step of `rows` (U,) of the table that `flat` is, `into` (U, H) on the
    host. Nothing of the table is written."""
    width = into.shape[1]
    count = max(1, _SLICE_ELEMENTS // width)
    for some, found in zip(rows.split(count), into.split(count), strict=True):
        part = _copied(flat, some, found)
        step_ = step_weights_on_host_ if part.moments_can_wait else step_on_host_
        step_(part, hyper=hyper, step=step, scale=scale)


def _copied(flat: Flat, rows: Tensor, weights: Tensor) -> Flat:
    """Copies of the table's rows, those of the weights in `weights` (U, H)."""
    width = weights.shape[1]

    def of(whole: Tensor, size: int = width) -> Tensor:
        return whole.view(-1, size).index_select(0, rows).view(-1)

    torch.index_select(flat.weights.view(-1, width), 0, rows, out=weights)
    return Flat(
        weights=weights.view(-1),
        lo=None if flat.lo is None else of(flat.lo),
        m=of(flat.m),
        v=of(flat.v),
        m_scale=None if flat.m_scale is None else of(flat.m_scale, width // STATE_BLOCK),
        v_scale=None if flat.v_scale is None else of(flat.v_scale, width // STATE_BLOCK),
        gradient=of(flat.gradient),
        rounding=flat.rounding,  # of moments, which are thrown away
        master=None if flat.master is None else of(flat.master),
    )
