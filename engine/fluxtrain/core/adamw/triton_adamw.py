"""AdamW on a GPU: one Triton kernel a range.

The order of operations is that of native/include/flux_native.h, with fused multiply-add switched
off and correctly rounded division and root, so the bits equal the host kernels'. One pass moves 26
bytes a parameter (torch operations in slices move several times that).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate
from fluxtrain.core.adamw.triton_low_bit import launch_8bit_, launch_bf16_
from fluxtrain.core.device.current_gpu import launching_on

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

_BLOCK = 1024

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _adamw(  # type: ignore[no-untyped-def]
        weight, low, m_at, v_at, gradient, clip_at, n,
        sign, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, rsqrt2, eps,
        SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        clip = tl.load(clip_at)
        inside = (at < n) & (clip == clip)  # a norm that is not finite changes nothing
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


def is_available() -> bool:
    """Return whether torch was built with Triton."""
    return triton is not None


def step_by_triton_(flat: Flat, update: AdamWUpdate) -> None:
    """Take one AdamW step in place on device tensors that `Flat.check` has passed.

    The host never waits: `update.clip` is read on the device, and NaN changes nothing.
    """
    clip = update.clip
    if clip is None:
        clip = torch.ones((), device=flat.weights.device)
    if flat.state_format == "8bit":
        launch_8bit_(flat, update, clip)
    elif flat.state_format == "bf16":
        launch_bf16_(flat, update, clip)
    else:
        _launch_(flat, update, clip)


def _launch_(flat: Flat, update: AdamWUpdate, clip: Tensor) -> None:
    c, n = update.coefficients(), flat.weights.numel()
    words: Any = flat.weights.view(torch.int16) if flat.lo is not None else flat.weights
    with launching_on(flat.weights):
        _adamw[((n + _BLOCK - 1) // _BLOCK,)](
            words, flat.lo if flat.lo is not None else words, flat.m, flat.v,
            flat.gradient, clip, n,
            c.grad_scale, c.decay, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2,
            c.step_size, c.rsqrt_correction2, c.eps,
            SPLIT=flat.lo is not None, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
