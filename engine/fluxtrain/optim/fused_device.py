"""The AdamW update of blocks that live on a GPU, as one Triton kernel a range: a launch costs the
host some 0.1 ms, which for a norm or a bias is all it costs, so neighbours share one.

The order of operations is that of native/include/flux_native.h, with fused multiply-add switched
off and correctly rounded division and root, so the bits equal the host kernels'. One pass moves 26
bytes a parameter (torch operations in slices move several times that).

Without Triton (or on CPU) `update_on_device_` does the same with torch operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fluxtrain.hardware.current_gpu import launching_on
from fluxtrain.memory.page_locks import host_empty
from fluxtrain.optim.hyper import Hyper, Turns, coefficients, decay
from fluxtrain.optim.split_adamw import update_on_device_

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

Flats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]  # weights, lo, m, v, gradient

_BLOCK = 1024

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _adamw(  # type: ignore[no-untyped-def]
        weight, low, m_at, v_at, gradient, clip_at, n,
        sign, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, rsqrt2, eps,
        borders_at, other_decay, SPLIT: tl.constexpr, BORDERS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        clip = tl.load(clip_at)
        inside = (at < n) & (clip == clip)  # a norm that is not finite leaves everything as it is
        g = tl.load(gradient + at, mask=inside).to(tl.float32) * (clip * sign)
        if SPLIT:
            top = tl.load(weight + at, mask=inside)
            rest = tl.where((top & 0x7FFF) == 0, 0, tl.load(low + at, mask=inside))
            bits = (top.to(tl.int32) << 16) + rest.to(tl.int32)
            p = bits.to(tl.float32, bitcast=True)
        else:
            p = tl.load(weight + at, mask=inside)
        m = tl.load(m_at + at, mask=inside) * beta1 + g * one_minus_beta1
        v = tl.load(v_at + at, mask=inside) * beta2 + (g * one_minus_beta2) * g
        below = tl.sqrt_rn(v) * rsqrt2 + eps
        if BORDERS > 0:
            passed = tl.zeros((BLOCK,), tl.int32)
            for i in tl.static_range(BORDERS):
                passed += (at >= tl.load(borders_at + i)).to(tl.int32)
            p = p * tl.where(passed % 2 == 1, other_decay, decay)
        else:
            p = p * decay
        p = p - tl.div_rn(m * step_size, below)
        nan = tl.full((BLOCK,), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
        p = tl.where(p == p, p, nan)
        tl.store(m_at + at, tl.where(m == m, m, nan), mask=inside)
        tl.store(v_at + at, tl.where(v == v, v, nan), mask=inside)
        if SPLIT:
            bits = p.to(tl.int32, bitcast=True)
            tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
            tl.store(low + at, bits.to(tl.int16), mask=inside)
        else:
            tl.store(weight + at, p, mask=inside)


def update_resident_(
    weights: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    *,
    hyper: Hyper,
    step: int,
    scale: float,
    clip: Tensor,
    turns: Turns | None = None,
) -> None:
    """One AdamW step in place on flat device tensors of one length.

    weights: bfloat16 with `lo` int16, or float32 with lo None; m, v: float32; gradient: bfloat16 or
    float32. Gradients count times `scale` (host number) times `clip` (0-d fp32 on the device, never
    read back; NaN leaves everything as it is). turns: parts that are decayed otherwise.
    """
    flats = weights, lo, m, v, gradient
    if triton is None or not weights.is_cuda:
        if bool(torch.isfinite(clip)):
            for part, how in _parts(flats, hyper, turns):
                update_on_device_(*part, hyper=how, step=step, grad_scale=float(clip) * scale)
        return
    _launch_(flats, hyper=hyper, step=step, scale=scale, clip=clip, turns=turns)


def _launch_(
    flats: Flats,
    *,
    hyper: Hyper,
    step: int,
    scale: float,
    clip: Tensor,
    turns: Turns | None,
) -> None:
    weights, lo, m, v, gradient = flats
    c = coefficients(hyper, step, scale)
    n = weights.numel()
    words: Any = weights.view(torch.int16) if lo is not None else weights
    borders = turns.borders if turns is not None else ()
    with launching_on(weights):
        _adamw[((n + _BLOCK - 1) // _BLOCK,)](
            words, lo if lo is not None else words, m, v, gradient, clip, n,
            c.grad_scale, c.decay, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2,
            c.step_size, c.rsqrt_correction2, c.eps,
            _on(weights.device, borders) if turns is not None else clip,
            decay(turns.other(hyper)) if turns is not None else c.decay,
            SPLIT=lo is not None, BORDERS=len(borders), BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _parts(flats: Flats, hyper: Hyper, turns: Turns | None) -> Iterator[tuple[Flats, Hyper]]:
    """The parts that take turns, each with its step."""
    if turns is None:
        yield flats, hyper
        return
    weights, lo, m, v, gradient = flats
    steps = cycle((hyper, turns.other(hyper)))
    for (start, stop), how in zip(turns.parts(weights.numel()), steps, strict=False):
        at = slice(start, stop)
        yield (weights[at], None if lo is None else lo[at], m[at], v[at], gradient[at]), how


@lru_cache(maxsize=256)
def _on(device: torch.device, borders: tuple[int, ...]) -> Tensor:
    """(borders,) int64, the same for all blocks of a model. Nobody waits for the copy."""
    here = host_empty((len(borders),), torch.int64, pin=device.type == "cuda")
    return here.copy_(torch.tensor(borders)).to(device, non_blocking=True)
