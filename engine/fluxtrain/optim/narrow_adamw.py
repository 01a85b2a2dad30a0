"""AdamW in place with states smaller than fp32: 8-bit block-wise, or bf16 rounded at random."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.optim import dynamic_map, reference
from fluxtrain.optim.dynamic_map import BLOCK
from fluxtrain.optim.hyper import Hyper, coefficients
from fluxtrain.optim.reference import Rounding, States8
from fluxtrain.optim.split_adamw import HALVES, by_reference, decode, encode, flat_length

_GRADS = (torch.bfloat16, torch.float32)
_SLICE_ELEMENTS = 1 << 20  # a multiple of the block; the oracle takes some 100 bytes for each


def update8_(
    weights: Tensor,
    lo: Tensor | None,
    states: States8,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
) -> None:
    """One AdamW step with 8-bit block-wise states on the host, in place, without the GIL.

    weights: bfloat16 with `lo` int16, or float32 with lo None; grad bfloat16 (split weights only)
    or float32; states: codes uint8 of the same length, scales float32 of one element for each 256.
    All zero bytes are the states before the first step. The result depends on neither threads nor
    instruction set, nor on cuts at multiples of 256 elements.
    """
    n = _length(weights, lo, {"m": states.m, "v": states.v}, grad, torch.uint8)
    for scale in (states.m_scale, states.v_scale):
        blocks = flat_length({"scale": scale}, {})
        if blocks != -(-n // BLOCK):
            raise ValueError(f"{n} elements need {-(-n // BLOCK)} scales, not {blocks}")
    held = _native.States8(*(tensor.data_ptr() for tensor in states))
    arguments = (
        ctypes.byref(held), grad.data_ptr(), n, by_reference(hyper, step, grad_scale), threads or 0
    )  # fmt: skip
    if lo is None:
        _native.kernel("adamw8_f32")(weights.data_ptr(), *arguments)
    else:
        name = "adamw8_split_bf16" if grad.dtype is torch.bfloat16 else "adamw8_split_f32"
        _native.kernel(name)(weights.data_ptr(), lo.data_ptr(), *arguments)


def update16_(
    weights: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    rounding: Rounding,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
) -> None:
    """One AdamW step with bfloat16 states on the host; `rounding` is that of the first element.

    Other arguments as for `update8_`; the result does not depend on how a range is cut at all.
    """
    n = _length(weights, lo, {"m": m, "v": v}, grad, torch.bfloat16)
    tensors = (weights, lo, m, v, grad)
    arguments = (
        *(tensor.data_ptr() for tensor in tensors if tensor is not None),
        n,
        ctypes.byref(_native.Rounding(*rounding)),
        by_reference(hyper, step, grad_scale),
        threads or 0,
    )
    wide = "f32" if lo is None else "split_f32"
    _native.kernel(f"adamw16_{'split_bf16' if grad.dtype is torch.bfloat16 else wide}")(*arguments)


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Flat fp32 moments `x` as codes (n,) uint8 and scales (blocks of 256 elements,) fp32, on their
    device. What is not finite is zero, as after an update."""
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-x.numel() // BLOCK), device=x.device)
    if x.device.type == "cpu":
        n = flat_length({"x": x}, {"x": (torch.float32,)})
        pointers = (x.data_ptr(), codes.data_ptr(), scales.data_ptr())
        _native.kernel("quantise8")(*pointers, n, int(signed), 0)
        return codes, scales
    for first in range(0, x.numel(), _SLICE_ELEMENTS):
        part = slice(first, first + _SLICE_ELEMENTS)
        finite = torch.where(torch.isfinite(x[part]), x[part], 0.0)
        blocks = slice(first // BLOCK, (first + _SLICE_ELEMENTS) // BLOCK)
        codes[part], scales[blocks] = dynamic_map.quantise(finite, signed=signed)
    return codes, scales


def update8_by_torch_(
    weights: Tensor,
    lo: Tensor | None,
    states: States8,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    slice_elements: int = _SLICE_ELEMENTS,
) -> None:
    """The step of `update8_` by the oracle's torch operations, on any device, in place."""
    c = coefficients(hyper, step, grad_scale)
    for first in range(0, weights.numel(), slice_elements):
        part = slice(first, first + slice_elements)
        blocks = slice(first // BLOCK, (first + slice_elements) // BLOCK)
        old = States8(
            states.m[part], states.v[part], states.m_scale[blocks], states.v_scale[blocks]
        )
        master, new = reference.adamw8(_master(weights, lo, part), old, grad[part], c)
        _keep(weights, lo, part, master)
        for to, value in zip(old, new, strict=True):
            to.copy_(value)


def update16_by_torch_(
    weights: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    rounding: Rounding,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    slice_elements: int = _SLICE_ELEMENTS,
) -> None:
    """The step of `update16_` by the oracle's torch operations, on any device, in place."""
    c = coefficients(hyper, step, grad_scale)
    for first in range(0, weights.numel(), slice_elements):
        part = slice(first, first + slice_elements)
        here = rounding._replace(first_element=rounding.first_element + first)
        master, m[part], v[part] = reference.adamw16(
            _master(weights, lo, part), m[part], v[part], grad[part], c, here
        )
        _keep(weights, lo, part, master)


def _master(weights: Tensor, lo: Tensor | None, part: slice) -> Tensor:
    return weights[part] if lo is None else decode(weights[part], lo[part])


def _keep(weights: Tensor, lo: Tensor | None, part: slice, master: Tensor) -> None:
    if lo is None:
        weights[part] = master
    else:
        weights[part], lo[part] = encode(master)


def _length(
    weights: Tensor,
    lo: Tensor | None,
    states: dict[str, Tensor],
    grad: Tensor,
    state_dtype: torch.dtype,
) -> int:
    named = {"weights": weights, **states, "grad": grad}
    dtypes: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(states, (state_dtype,))
    if lo is not None:
        named["lo"] = lo
        dtypes |= {"weights": HALVES, "lo": HALVES, "grad": _GRADS}
    return flat_length(named, dtypes)
