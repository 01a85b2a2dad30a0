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
    count = min(max(1, _SLICE_ELEMENTS // width), max(1, len(rows)))
    copies = _Copies(flat, width, count)
    for some, found in zip(rows.split(count), into.split(count), strict=True):
        part = copies.of(some, found)
        step_ = step_weights_on_host_ if part.moments_can_wait else step_on_host_
        step_(part, hyper=hyper, step=step, scale=scale)


class _Copies:
    """Copies of some rows of a table, each time in the same memory: new pages for every slice take
    longer than the copies."""

    def __init__(self, flat: Flat, width: int, count: int) -> None:
        self._flat = flat
        self._memory: dict[str, Tensor] = {}
        for name in ("lo", "m", "v", "m_scale", "v_scale", "gradient", "master"):
            whole: Tensor | None = getattr(flat, name)
            if whole is not None:
                size = width // STATE_BLOCK if name in ("m_scale", "v_scale") else width
                self._memory[name] = torch.empty((count, size), dtype=whole.dtype)

    def of(self, rows: Tensor, weights: Tensor) -> Flat:
        """Of `rows` (n,), until the next ones; those of the weights in `weights` (n, H)."""

        def copied(name: str) -> Tensor | None:
            memory = self._memory.get(name)
            if memory is None:
                return None
            whole = getattr(self._flat, name).view(-1, memory.shape[1])
            return torch.index_select(whole, 0, rows, out=memory[: len(rows)]).view(-1)

        flat = self._flat
        torch.index_select(flat.weights.view(-1, weights.shape[1]), 0, rows, out=weights)
        m, v, gradient = copied("m"), copied("v"), copied("gradient")
        assert m is not None and v is not None and gradient is not None
        return Flat(
            weights=weights.view(-1),
            lo=copied("lo"),
            m=m,
            v=v,
            m_scale=copied("m_scale"),
            v_scale=copied("v_scale"),
            gradient=gradient,
            rounding=flat.rounding,  # of moments, which are thrown away
            master=copied("master"),
        )
