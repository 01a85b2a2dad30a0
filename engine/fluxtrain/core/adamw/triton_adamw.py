"""AdamW on a GPU: one Triton kernel a range.

The order of operations is that of native/include/flux_native.h, with fused multiply-add switched
off and correctly rounded division and root, so bits and 8-bit codes equal the host kernels'. One
pass moves 26 bytes a parameter, with 8-bit states 14, with bf16 states 18 (torch operations in
slices move several times that).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.adamw import dynamic_map
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, low_bit_coefficients
from fluxtrain.core.device.current_gpu import launching_on

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

_BLOCK = 1024  # elements a program
_ROWS = 4  # blocks of 256 elements a program

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

    @triton.jit  # type: ignore[untyped-decorator]
    def _master(weight, low, at, inside, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
        if SPLIT:
            top = tl.load(weight + at, mask=inside, other=0)
            rest = tl.where((top & 0x7FFF) == 0, 0, tl.load(low + at, mask=inside, other=0))
            p = ((top.to(tl.int32) << 16) + rest.to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            p = tl.load(weight + at, mask=inside, other=0.0)
        return p

    @triton.jit
    def _quiet(x):  # type: ignore[no-untyped-def]
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x == x, bits, 0x7FC00000).to(tl.float32, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator]
    def _keep(weight, low, at, inside, p, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
        p = _quiet(p)
        if SPLIT:
            bits = p.to(tl.int32, bitcast=True)
            tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
            tl.store(low + at, bits.to(tl.int16), mask=inside)
        else:
            tl.store(weight + at, p, mask=inside)

    @triton.jit
    def _line(y, table):  # type: ignore[no-untyped-def]
        """Compute bits 16 to 23 of the line in y; see `dynamic_map.line_table`."""
        y = tl.maximum(y, 1.4901161193847656e-08)
        decade = (y >= tl.load(table)).to(tl.int32)
        for i in tl.static_range(1, 7):
            decade += (y >= tl.load(table + i)).to(tl.int32)
        line = tl.fma(tl.load(table + 8 + decade), y, tl.load(table + 16 + decade))
        line = tl.minimum(line, tl.load(table + 24 + decade))
        return (line.to(tl.int32, bitcast=True) >> 16) & 0xFF

    @triton.jit
    def _decayed(code, zero, scale, beta, least, table):  # type: ignore[no-untyped-def]
        """Compute a code's value after decay; see `dynamic_map.decayed`."""
        left = scale * beta
        left = tl.where(left >= 8.271806125530277e-25, left, least)[:, None]
        k = (code - zero).to(tl.float32)
        offset = tl.load(table + 256 + code) * left
        return tl.fma(tl.load(table + code) * left, k, tl.where(k < 0, -offset, offset))

    @triton.jit  # type: ignore[untyped-decorator]
    def _adamw8(  # type: ignore[no-untyped-def]
        weight, low, m_at, v_at, m_scale_at, v_scale_at, gradient, clip_at, n,
        m_values, v_values, m_table, v_table,
        sign, decay, beta1, beta2, one_minus_beta1, root_of_one_minus_beta2, minus_step, eps,
        SPLIT: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        at = block[:, None] * 256 + tl.arange(0, 256)[None, :]
        clip = tl.load(clip_at)
        inside = (at < n) & (clip == clip)  # a norm that is not finite changes nothing
        begun = (block * 256 < n) & (clip == clip)
        m_scale = tl.load(m_scale_at + block, mask=begun, other=0.0)
        v_scale = tl.load(v_scale_at + block, mask=begun, other=0.0)
        m_code = tl.load(m_at + at, mask=inside, other=127).to(tl.int32)
        v_code = tl.load(v_at + at, mask=inside, other=0).to(tl.int32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        p = _master(weight, low, at, inside, SPLIT)
        m = _decayed(m_code, 127, m_scale, beta1, 0.0, m_values)
        m = tl.fma(g, one_minus_beta1 * (clip * sign), m)
        g = g * (root_of_one_minus_beta2 * (clip * sign))
        v = tl.fma(g, g, _decayed(v_code, -1, v_scale, beta2, 8.271806125530277e-25, v_values))
        p = tl.fma(tl.div_rn(m, tl.sqrt_rn(v) + eps), minus_step, p * decay)
        _keep(weight, low, at, inside, p, SPLIT)
        finite = (tl.abs(m) < float("inf")) & (v < float("inf")) & inside
        m = tl.where(finite, m, 0.0)
        v = tl.where(finite, v, 0.0)
        m_scale = tl.maximum(tl.max(tl.abs(m), 1), 1.6543612251060553e-24)
        v_scale = tl.maximum(tl.max(v, 1), 1.6543612251060553e-24)
        tl.store(m_scale_at + block, m_scale, mask=begun)
        tl.store(v_scale_at + block, v_scale, mask=begun)
        m_to_y = tl.div_rn(tl.full((ROWS,), 0.0646820068359375, tl.float32), m_scale)
        k = _line(tl.abs(m * m_to_y[:, None]), m_table)
        code = tl.where(m.to(tl.int32, bitcast=True) < 0, tl.maximum(127 - k, 0), 127 + k)
        tl.store(m_at + at, code.to(tl.uint8), mask=inside)
        tells_zero = tl.full((ROWS, 256), -1.1754943508222875e-38, tl.float32)
        v_to_y = tl.div_rn(tl.full((ROWS,), 0.046958923339843750, tl.float32), v_scale)
        y = tl.fma(v, v_to_y[:, None], tells_zero)
        has_sign = y.to(tl.int32, bitcast=True) < 0  # -0 too
        code = tl.where(has_sign, 0, (_line(y, v_table) - 1) & 0xFF)
        tl.store(v_at + at, code.to(tl.uint8), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _hash(x, first_key, second_key, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        x = x ^ first_key.to(tl.uint32)
        x = x ^ (x >> 16)
        x = x * tl.full((BLOCK,), 0x21F0AAAD, tl.uint32)
        x = x ^ (x >> 15)
        x = x ^ second_key.to(tl.uint32)
        x = x * tl.full((BLOCK,), 0xD35A2D97, tl.uint32)
        return x ^ (x >> 15)

    # The keys differ from step to step, so a kernel specialised to their values is useless.
    @triton.jit(do_not_specialize=["first_element", "first_key", "second_key"])  # type: ignore[untyped-decorator]
    def _adamw16(  # type: ignore[no-untyped-def]
        weight, low, m_at, v_at, gradient, clip_at, n, first_element, first_key, second_key,
        sign, decay, beta1, beta2, one_minus_beta1, root_of_one_minus_beta2, minus_step, eps,
        SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        clip = tl.load(clip_at)
        inside = (at < n) & (clip == clip)
        m = tl.load(m_at + at, mask=inside, other=0).to(tl.int32) << 16
        v = tl.load(v_at + at, mask=inside, other=0).to(tl.int32) << 16
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        p = _master(weight, low, at, inside, SPLIT)
        m = tl.fma(g, one_minus_beta1 * (clip * sign), m.to(tl.float32, bitcast=True) * beta1)
        g = g * (root_of_one_minus_beta2 * (clip * sign))
        v = tl.fma(g, g, v.to(tl.float32, bitcast=True) * beta2)
        p = tl.fma(tl.div_rn(m, tl.sqrt_rn(v) + eps), minus_step, p * decay)
        _keep(weight, low, at, inside, p, SPLIT)
        number = (at + first_element).to(tl.uint32)  # `reference.random_bits`: 1024 a segment
        of_segment = _hash(~(number >> 10), first_key, second_key, BLOCK)
        x = _hash(number & 1023, first_key, second_key, BLOCK) ^ of_segment
        low_half = (x & 0xFFFF).to(tl.int32)
        high_half = (x >> 16).to(tl.int32)
        m_bits = _quiet(m).to(tl.int32, bitcast=True) + low_half
        v_bits = _quiet(v).to(tl.int32, bitcast=True) + high_half
        tl.store(m_at + at, (m_bits >> 16).to(tl.int16), mask=inside)
        tl.store(v_at + at, (v_bits >> 16).to(tl.int16), mask=inside)


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
        _launch_8bit_(flat, update, clip)
    elif flat.state_format == "bf16":
        _launch_bf16_(flat, update, clip)
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


def _launch_8bit_(flat: Flat, update: AdamWUpdate, clip: Tensor) -> None:
    """Take one AdamW step with 8-bit states in place; `clip` (0-d fp32) scales the gradients."""
    c = update.coefficients()
    low_bit = low_bit_coefficients(c._replace(grad_scale=1.0))
    n, device = flat.weights.numel(), flat.weights.device
    words: Any = flat.weights.view(torch.int16) if flat.lo is not None else flat.weights
    with launching_on(flat.weights):
        _adamw8[(-(-n // (_ROWS * dynamic_map.BLOCK)),)](
            words, flat.lo if flat.lo is not None else words, *flat.states8, flat.gradient, clip, n,
            _values(True, device), _values(False, device),
            _table(True, device), _table(False, device),
            c.grad_scale, c.decay, c.beta1, c.beta2, *low_bit,
            SPLIT=flat.lo is not None, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _launch_bf16_(flat: Flat, update: AdamWUpdate, clip: Tensor) -> None:
    """Take one AdamW step with bfloat16 states rounded at random, otherwise as `_launch_8bit_`."""
    assert flat.rounding is not None
    c = update.coefficients()
    low_bit = low_bit_coefficients(c._replace(grad_scale=1.0))
    n = flat.weights.numel()
    words: Any = flat.weights.view(torch.int16) if flat.lo is not None else flat.weights
    with launching_on(flat.weights):
        _adamw16[(-(-n // _BLOCK),)](
            words, flat.lo if flat.lo is not None else words,
            flat.m.view(torch.int16), flat.v.view(torch.int16),
            flat.gradient, clip, n, *(_signed(word) for word in flat.rounding),
            c.grad_scale, c.decay, c.beta1, c.beta2, *low_bit,
            SPLIT=flat.lo is not None, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _signed(word: int) -> int:
    """Return the 32 bits as a signed number, which Triton takes for an int32."""
    return word - (1 << 32) if word >= 1 << 31 else word


@lru_cache(maxsize=32)
def _values(signed: bool, device: torch.device) -> Tensor:
    return dynamic_map.value_table(signed=signed).to(device)


@lru_cache(maxsize=32)
def _table(signed: bool, device: torch.device) -> Tensor:
    return dynamic_map.line_table(signed=signed).to(device)
