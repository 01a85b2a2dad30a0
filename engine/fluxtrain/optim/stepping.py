"""One AdamW step of a range of weights, whatever the format of its states and wherever it lives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fluxtrain.hardware.cgroup import quota_cores
from fluxtrain.optim.fused_device import update_resident_
from fluxtrain.optim.fused_narrow import update8_resident_, update16_resident_
from fluxtrain.optim.hyper import Hyper, Turns
from fluxtrain.optim.narrow_adamw import update8_, update16_
from fluxtrain.optim.reference import Rounding, States8
from fluxtrain.optim.split_adamw import (
    update_,
    update_f32_,
    update_moments_,
    update_weights_,
    update_weights_f32_,
)
from fluxtrain.plan.states import STATE_BLOCK

_WORD = 0xFFFFFFFF
FEW_CORES = 4  # fewer are all for the update
_SLICE_ELEMENTS = 1 << 18  # a multiple of STATE_BLOCK: their fp32 gradients stay in the caches


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Flat tensors of one length (scales: one element for each 256)."""

    weights: Tensor  # bfloat16 with `lo`, float16 with `master`, or float32
    lo: Tensor | None  # int16
    m: Tensor  # float32, bfloat16, or uint8 codes with scales
    v: Tensor
    m_scale: Tensor | None
    v_scale: Tensor | None
    gradient: Tensor
    rounding: Rounding  # of bfloat16 moments
    master: Tensor | None = None  # float32

    def cut(self, start: int, stop: int) -> Flat:
        """A range of it; `start` at a multiple of STATE_BLOCK."""
        part, blocks = slice(start, stop), slice(start // STATE_BLOCK, -(-stop // STATE_BLOCK))
        first = self.rounding.first_element + start & _WORD

        def of(flat: Tensor | None, where: slice) -> Tensor | None:
            return None if flat is None else flat[where]

        return Flat(
            weights=self.weights[part],
            lo=of(self.lo, part),
            m=self.m[part],
            v=self.v[part],
            m_scale=of(self.m_scale, blocks),
            v_scale=of(self.v_scale, blocks),
            gradient=self.gradient[part],
            rounding=self.rounding._replace(first_element=first),
            master=of(self.master, part),
        )

    def of_masters(self, gradient: Tensor) -> Flat:
        """The same step on the fp32 masters."""
        assert self.master is not None
        return replace(self, weights=self.master, master=None, gradient=gradient)

    @property
    def moments_can_wait(self) -> bool:
        """Has the update two passes, the weights' and the moments'? Those of the other formats are
        small, or are written with the masters."""
        return self.master is None and self.m.dtype is torch.float32

    @property
    def states8(self) -> States8 | None:
        """The states where they are of 8 bits."""
        if self.m_scale is None or self.v_scale is None:
            return None
        return States8(self.m, self.v, self.m_scale, self.v_scale)


def update_threads(computation: torch.device) -> int | None:
    """How many update on the host. Beside a GPU an eighth of the cores, at least one, is left to
    the threads that queue its work, which otherwise wait for a core, and updates for whoever took
    one from them. Under a CPU quota no more than it keeps running, for more run for a part of each
    period and then stand still together. None: all of OpenMP's."""
    quota, cores = quota_cores(), torch.get_num_threads()
    threads = quota if quota is not None and quota < cores else None
    cores = cores if threads is None else threads
    if computation.type == "cpu" or cores < FEW_CORES:
        return threads
    return cores - max(1, cores // 8)


def step_on_host_(
    flat: Flat,
    *,
    hyper: Hyper,
    step: int,
    scale: float,
    threads: int | None = None,
    turns: Turns | None = None,
) -> None:
    """In place by the native kernels; gradients count times `scale`. threads None: all. turns:
    parts that are decayed otherwise, of fp32 moments beside weights that are their masters."""
    f, states8 = flat, flat.states8
    how: dict[str, Any] = {"hyper": hyper, "step": step, "grad_scale": scale, "threads": threads}
    if f.moments_can_wait and f.lo is None:
        update_f32_(f.weights, f.m, f.v, f.gradient, **how, turns=turns)
        return
    if f.moments_can_wait and f.lo is not None:
        update_(f.weights, f.lo, f.m, f.v, f.gradient, **how, turns=turns)
        return
    assert turns is None
    if f.master is not None:
        _step_masters_on_host_(f, hyper=hyper, step=step, scale=scale, threads=threads)
    elif states8 is not None:
        update8_(f.weights, f.lo, states8, f.gradient, **how)
    else:
        update16_(f.weights, f.lo, f.m, f.v, f.gradient, f.rounding, **how)


def step_weights_on_host_(
    flat: Flat,
    *,
    hyper: Hyper,
    step: int,
    scale: float,
    threads: int | None = None,
    turns: Turns | None = None,
) -> None:
    """The weights of `step_on_host_` alone, where the moments can wait."""
    f = flat
    how: dict[str, Any] = {"hyper": hyper, "step": step, "grad_scale": scale, "threads": threads}
    if f.lo is None:
        update_weights_f32_(f.weights, f.m, f.v, f.gradient, **how, turns=turns)
    else:
        update_weights_(f.weights, f.lo, f.m, f.v, f.gradient, **how, turns=turns)


def step_moments_on_host_(
    flat: Flat, *, hyper: Hyper, step: int, scale: float, threads: int | None = None
) -> None:
    """The moments of `step_on_host_` alone, with the arguments of their weights' pass (the weight
    decay has no part in them): after both every bit is the same. The gradient must be the one that
    the weights' pass saw."""
    update_moments_(
        flat.m, flat.v, flat.gradient, hyper=hyper, step=step, grad_scale=scale, threads=threads
    )


def step_on_device_(
    flat: Flat,
    *,
    hyper: Hyper,
    step: int,
    scale: float,
    clip: Tensor,
    turns: Turns | None = None,
) -> None:
    """In place where the tensors are, with the bits of `step_on_host_`; gradients count times
    `scale` and `clip` (0-d fp32 on the device; NaN leaves everything as it is). turns: parts that
    are decayed otherwise, of fp32 moments alone."""
    f, states8 = flat, flat.states8
    if f.master is not None and f.weights.is_cuda:
        masters = f.of_masters(f.gradient)
        step_on_device_(masters, hyper=hyper, step=step, scale=scale, clip=clip, turns=turns)
        f.weights.copy_(f.master)  # of a step that is left out, the same again
        return
    if f.m.dtype is torch.float32 and f.master is None:
        update_resident_(
            f.weights, f.lo, f.m, f.v, f.gradient,
            hyper=hyper, step=step, scale=scale, clip=clip, turns=turns,
        )  # fmt: skip
        return
    assert turns is None
    if not f.weights.is_cuda:
        if bool(torch.isfinite(clip)):
            step_on_host_(flat, hyper=hyper, step=step, scale=float(clip) * scale)
    elif states8 is not None:
        update8_resident_(
            f.weights, f.lo, states8, f.gradient, hyper=hyper, step=step, scale=scale, clip=clip
        )
    else:
        update16_resident_(
            f.weights, f.lo, f.m, f.v, f.gradient, f.rounding,
            hyper=hyper, step=step, scale=scale, clip=clip,
        )  # fmt: skip


def _step_masters_on_host_(
    flat: Flat, *, hyper: Hyper, step: int, scale: float, threads: int | None
) -> None:
    """fp16 weights: their masters take the step of fp32 ones, slice by slice, and are rounded."""
    n = flat.weights.numel()
    wide = torch.empty(min(n, _SLICE_ELEMENTS), dtype=torch.float32)
    for start in range(0, n, _SLICE_ELEMENTS):
        part = flat.cut(start, min(start + _SLICE_ELEMENTS, n))
        gradient = part.gradient
        if gradient.dtype is not torch.float32:
            gradient = wide[: gradient.numel()].copy_(gradient)
        masters = part.of_masters(gradient)
        step_on_host_(masters, hyper=hyper, step=step, scale=scale, threads=threads)
        part.weights.copy_(masters.weights)
