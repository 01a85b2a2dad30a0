"""Unpacking on a GPU: one launch a block of nf4 weights, one a weight of int8.

Operations and their order are those of `reference.unpack`, with fused multiply-add switched off,
so the bits are the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fluxtrain.core.device.current_gpu import launching_on
from fluxtrain.core.quantization.layout import BLOCK, NESTED, PackedLayout
from fluxtrain.core.quantization.reference import INT8_STEP, NF4

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

AVAILABLE = triton is not None
_BYTES = 1024  # of codes a program
_ELEMENTS = 2048  # of int8 codes a program

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _nf4(  # type: ignore[no-untyped-def]
        codes, absmax, scales, offsets, map_at, values, out,
        HALF_BLOCK: tl.constexpr, NESTED: tl.constexpr, DOUBLE: tl.constexpr, BYTES: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0).to(tl.int64) * BYTES
        at = first + tl.arange(0, BYTES)
        pair = tl.load(codes + at)
        block = at // HALF_BLOCK
        if DOUBLE:
            spread = tl.load(map_at + tl.load(absmax + block).to(tl.int32))
            group = block // NESTED
            peak = spread * tl.load(scales + group) + tl.load(offsets + group)
        else:
            peak = tl.load(absmax + block)
        high = tl.load(values + (pair >> 4).to(tl.int32)) * peak
        low = tl.load(values + (pair & 15).to(tl.int32)) * peak
        both = tl.interleave(high, low)
        tl.store(out + 2 * first + tl.arange(0, 2 * BYTES), both.to(out.dtype.element_ty))

    @triton.jit  # type: ignore[untyped-decorator]
    def _int8(  # type: ignore[no-untyped-def]
        codes, absmax, out, n, columns, step, ELEMENTS: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < n
        peak = tl.load(absmax + at // columns, mask=inside)
        value = tl.load(codes + at, mask=inside).to(tl.float32) * peak * step
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=16)
def _values(device: torch.device) -> Tensor:
    """Return the 16 values of nf4 on a device."""
    with torch.inference_mode(False):
        return torch.tensor(NF4, device=device)


def unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    """Compute the dense form into out (elements,) on the GPU of `packed` (size_bytes,)."""
    arrays = layout.arrays(packed)
    with launching_on(packed):
        if layout.format == "int8":
            _unpack_int8(layout, arrays, out)
            return
        double = layout.format == "nf4-double"
        absmax = arrays["absmax"]
        _nf4[(layout.elements // 2 // _BYTES,)](
            arrays["codes"], absmax, arrays.get("scales", absmax), arrays.get("offsets", absmax),
            arrays.get("map", absmax), _values(packed.device), out,
            HALF_BLOCK=BLOCK // 2, NESTED=NESTED, DOUBLE=double, BYTES=_BYTES,
            enable_fp_fusion=False,
        )  # fmt: skip


def _unpack_int8(layout: PackedLayout, arrays: dict[str, Tensor], out: Tensor) -> None:
    for weight in layout.weights:
        stop = weight.first + weight.count
        _int8[(-(-weight.count // _ELEMENTS),)](
            arrays["codes"][weight.first : stop],
            arrays["absmax"][weight.first_row :],
            out[weight.first : stop],
            weight.count,
            weight.columns,
            INT8_STEP,
            ELEMENTS=_ELEMENTS,
            enable_fp_fusion=False,
        )
