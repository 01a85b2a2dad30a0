"""The oracle: AdamW on split master weights in plain torch, one rounded operation at a time.

The native kernels and the device update must equal it bit for bit. Nothing fused is used (no lerp,
addcmul or addcdiv): a fused multiply-add rounds once where these round twice. The order of the
operations is that of native/include/flux_native.h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluxtrain.optim.hyper import Coefficients


def quiet(x: Tensor) -> Tensor:
    """`x` with every NaN replaced by 0x7fc00000, the one NaN that all implementations store."""
    return torch.nan_to_num(x, nan=math.nan, posinf=math.inf, neginf=-math.inf)


def encode(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 `master` into (hi, lo): the nearest bf16, ties away from zero, and the low bits.

    hi is bfloat16, lo is int16, both of the shape of `master`; any device. NaN becomes one NaN.
    """
    bits = quiet(master).view(torch.int32)
    hi = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return hi, bits.to(torch.int16)


def decode(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 master of (hi bfloat16, lo int16): exact for all that `encode` gave.

    hi = +-0 gives +-0 whatever lo holds, so masters below 2**-134 become 0.
    """
    top = hi.view(torch.int16)
    low = torch.where((top & 0x7FFF) == 0, 0, lo)
    # Adding lo as a signed number is ((hi - (lo >> 15)) << 16) | lo of the unsigned one.
    return ((top.to(torch.int32) << 16) + low).view(torch.float32)


def rounded_sqrt(x: Tensor) -> Tensor:
    """The fp32 square root, correctly rounded, of fp32 `x`.

    torch's CPU build hands large tensors to MKL, whose fp32 root is off by one bit for one value in
    3,000; a double one rounded to fp32 is exact. CUDA's is correctly rounded as it is.
    """
    return torch.sqrt(x) if x.is_cuda else torch.sqrt(x.double()).float()


def adamw(
    master: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW update; returns the new (master, m, v).

    master, m, v: fp32 of one shape; grad: fp32 or bf16 of the same shape; any device.
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    g = grad.to(torch.float32) * c.grad_scale
    decayed = master * c.decay
    m = m * c.beta1 + g * c.one_minus_beta1
    v = v * c.beta2 + (g * c.one_minus_beta2) * g
    denominator = rounded_sqrt(v) * c.rsqrt_correction2 + c.eps
    master = decayed - (m * c.step_size) / denominator
    return quiet(master), quiet(m), quiet(v)
