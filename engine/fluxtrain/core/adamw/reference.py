"""The oracle: AdamW on split master weights in plain torch, one rounded operation at a time.

The native kernels and the device update must equal it bit for bit. With fp32 states nothing fused
is used (no lerp, addcmul or addcdiv): a fused multiply-add rounds once, separate operations twice.
Updates with bf16 and 8-bit states use fused multiply-adds (`_fused`). The order of the operations
is that of native/include/flux_native.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fluxtrain.core.adamw import dynamic_map
from fluxtrain.core.adamw.fp32 import mul_add, quiet, rounded_sqrt
from fluxtrain.core.adamw.hyper import Coefficients, low_bit_coefficients

_WORD = 0xFFFFFFFF


class States8(NamedTuple):
    """Moments as codes (n,) uint8 with one fp32 scale for each block of 256 elements."""

    m: Tensor
    v: Tensor
    m_scale: Tensor
    v_scale: Tensor


_SEGMENT = 1024  # elements; a power of two, so they stay aligned where element numbers wrap


class Rounding(NamedTuple):
    """The source of the random numbers of a range of elements (struct flux_rounding)."""

    first_element: int
    first_key: int
    second_key: int


def rounding(seed: int, step: int, first_element: int) -> Rounding:
    """Return the rounding of step `step`: its keys are the two halves of SplitMix64 (Steele, Lea
    and Flood, Fast Splittable Pseudorandom Number Generators, 2014) of the seed, advanced by the
    step."""
    x = (seed + (step + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 31
    return Rounding(first_element & _WORD, x & _WORD, x >> 32)


def encode(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 `master` into (hi, lo): the nearest bf16, ties away from zero, and the low bits.

    hi is bfloat16, lo is int16, both of the shape of `master`; any device. NaN becomes one NaN.
    """
    bits = quiet(master).view(torch.int32)
    hi = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return hi, bits.to(torch.int16)


def decode(hi: Tensor, lo: Tensor) -> Tensor:
    """Join (hi bfloat16, lo int16) into the fp32 master: exact for every result of `encode`.

    hi = +-0 gives +-0 whatever lo holds, so masters below 2**-134 become 0.
    """
    top = hi.view(torch.int16)
    low = torch.where((top & 0x7FFF) == 0, 0, lo)
    # Adding lo as a signed number is ((hi - (lo >> 15)) << 16) | lo of the unsigned one.
    return ((top.to(torch.int32) << 16) + low).view(torch.float32)


def adamw(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW update; returns the new (master, m, v).

    master, m, v: fp32 of one shape; grad: fp32 or bf16 of the same shape; any device.
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    m, v = _averages(m, v, grad, c)
    return quiet(_stepped(master, m, v, c)), quiet(m), quiet(v)


def adamw_weights(master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: Coefficients) -> Tensor:
    """Return the new master alone; m and v are those before the step."""
    return quiet(_stepped(master, *_averages(m, v, grad, c), c))


def adamw_moments(m: Tensor, v: Tensor, grad: Tensor, c: Coefficients) -> tuple[Tensor, Tensor]:
    """Return the new (m, v) alone."""
    m, v = _averages(m, v, grad, c)
    return quiet(m), quiet(v)


def _stepped(master: Tensor, m: Tensor, v: Tensor, c: Coefficients) -> Tensor:
    """Return the new master from the new moments; a NaN may have any bits."""
    denominator = rounded_sqrt(v) * c.rsqrt_correction2 + c.eps
    return master * c.decay - (m * c.step_size) / denominator


def _averages(m: Tensor, v: Tensor, grad: Tensor, c: Coefficients) -> tuple[Tensor, Tensor]:
    """Return the new moments; a NaN may have any bits."""
    g = grad.to(torch.float32) * c.grad_scale
    return m * c.beta1 + g * c.one_minus_beta1, v * c.beta2 + (g * c.one_minus_beta2) * g


def adamw8(
    master: Tensor, states: States8, grad: Tensor, c: Coefficients
) -> tuple[Tensor, States8]:
    """One AdamW update with 8-bit block-wise states; returns the new (master, states).

    Flat tensors. The update uses the exact new moments, which are quantised afterwards; an
    element whose moments are not finite starts again from zero. Dettmers et al., 8-bit Optimizers
    via Block-wise Quantization, 2021.
    """
    m = dynamic_map.decayed(states.m, states.m_scale, c.beta1, signed=True)
    v = dynamic_map.decayed(states.v, states.v_scale, c.beta2, signed=False)
    master, m, v = _fused(master, m, v, grad, c)
    finite = torch.isfinite(m) & torch.isfinite(v)
    new_m = dynamic_map.quantise(torch.where(finite, m, 0.0), signed=True)
    new_v = dynamic_map.quantise(torch.where(finite, v, 0.0), signed=False)
    return master, States8(new_m[0], new_v[0], new_m[1], new_v[1])


def adamw16(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: Coefficients, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Update once with m and v in bf16, rounded at random; return the new (master, m, v)."""
    master, wide_m, wide_v = _fused(master, m.float() * c.beta1, v.float() * c.beta2, grad, c)
    bits = random_bits(rounding, master.numel(), master.device)
    return master, _rounded(quiet(wide_m), bits & 0xFFFF), _rounded(quiet(wide_v), bits >> 16)


def _fused(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (master, m, v) by the operations of low-bit states. m and v are decayed
    already; a NaN may have any bits. Kingma and Ba, Adam, 2015, end of section 2."""
    low_bit = low_bit_coefficients(c)
    g = grad.to(torch.float32)
    m = mul_add(low_bit.of_m, g, m)
    g = g * low_bit.of_v
    v = mul_add(g, g, v)
    quotient = m / (rounded_sqrt(v) + low_bit.eps)
    return quiet(mul_add(low_bit.minus_step, quotient, master * c.decay)), m, v


def random_bits(rounding: Rounding, count: int, device: torch.device | None = None) -> Tensor:
    """Return 32 random bits (in int64) for each of `count` elements: the bits of its place in a
    segment of 1024 elements, exclusive-or the bits of the segment.

    So a kernel looks up most of them (tabulation: Zobrist, A New Hashing Method, 1970). If the
    hash is random, the bits of any three elements are independent (Patrascu and Thorup, The Power
    of Simple Tabulation Hashing, 2012), so errors of sums are as large as with independent bits.
    """
    number = torch.arange(count, device=device) + rounding.first_element & _WORD
    place, segment = number % _SEGMENT, number // _SEGMENT
    return _hash(place, rounding) ^ _hash(segment ^ _WORD, rounding)


def _hash(x: Tensor, rounding: Rounding) -> Tensor:
    """Hash each number of 32 bits to 32 bits, both in int64.

    Two rounds of multiplication and shifts (Wellons, Prospecting for Hash Functions, 2018), with
    the keys of the step before and between them, so that two steps share no sequence.
    """
    x = x ^ rounding.first_key
    x = x ^ x >> 16
    x = x * 0x21F0AAAD & _WORD
    x = x ^ x >> 15
    x = x ^ rounding.second_key
    x = x * 0xD35A2D97 & _WORD
    return x ^ x >> 15


def _rounded(x: Tensor, random16: Tensor) -> Tensor:
    """Round fp32 to bf16 at random: away from zero with a probability equal to the part cut off."""
    bits = x.view(torch.int32).to(torch.int64) & _WORD
    return (bits + random16 >> 16).to(torch.int16).view(torch.bfloat16)
