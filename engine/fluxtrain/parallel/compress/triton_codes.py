"""Codes of 8 bits and their scales on a GPU, in one pass over the values each way.

Operations and their order are those of `quantised.py`, so the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.core.device.current_gpu import launching_on

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

_VALUES = 4096  # a program
_LEAST_CAPABILITY = (8, 9)  # whose instructions convert to 8-bit floating point

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _encode(  # type: ignore[no-untyped-def]
        rows, codes, scales, count, blocks, top,
        FLOATS: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        block = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = tl.load(rows + row * count + at, mask=at < count, other=0.0)
        peak = tl.max(tl.abs(values), 1)
        broken = tl.sum((values != values).to(tl.int32), 1)  # a maximum leaves NaN out
        scale = tl.where(broken > 0, float("nan"), tl.div_rn(peak, top))
        tl.store(scales + row * blocks + block, scale, mask=block < blocks)
        scaled = tl.div_rn(values, tl.where(scale > 0, scale, 1.0)[:, None])
        if FLOATS:
            code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:  # to the nearest, and of two to the even one
            code = (scaled + 12582912.0 - 12582912.0 + top).to(tl.uint8)
        tl.store(codes + row * count + at, code, mask=at < count)

    @triton.jit  # type: ignore[untyped-decorator]
    def _decode(  # type: ignore[no-untyped-def]
        codes, scales, rows, count, blocks, top,
        FLOATS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
        code = tl.load(codes + row * count + at, mask=at < count)
        scale = tl.load(scales + row * blocks + at // BLOCK, mask=at < count)
        if FLOATS:
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = code.to(tl.float32) - top
        tl.store(rows + row * count + at, value * scale, mask=at < count)


def takes(values: Tensor, block: int) -> bool:
    """Return whether the kernels take what is on this device, in blocks of so many values."""
    if triton is None or not values.is_cuda or block > _VALUES or block & (block - 1):
        return False
    return torch.cuda.get_device_capability(values.device) >= _LEAST_CAPABILITY


def encode(rows: Tensor, block: int, top: float, *, floats: bool | None) -> tuple[Tensor, Tensor]:
    """Return codes (R, N), uint8, of rows (R, N) in fp32, and scales (R, blocks, 1)."""
    rows = rows.contiguous()
    count, blocks = rows.shape[1], -(-rows.shape[1] // block)
    codes = torch.empty_like(rows, dtype=torch.uint8)
    scales = rows.new_empty(len(rows), blocks, 1)
    many = _VALUES // block
    with launching_on(rows):
        _encode[(-(-blocks // many), len(rows))](
            rows,
            codes,
            scales,
            count,
            blocks,
            float(top),
            FLOATS=bool(floats),
            BLOCK=block,
            MANY=many,
        )
    return codes, scales


def decode(codes: Tensor, scales: Tensor, block: int, top: float, *, floats: bool | None) -> Tensor:
    """Return what `encode` has encoded, rounded, (R, N) in fp32."""
    codes, scales = codes.contiguous(), scales.contiguous()
    rows = torch.empty(codes.shape, device=codes.device)
    count = codes.shape[1]
    with launching_on(codes):
        _decode[(-(-count // _VALUES), len(codes))](
            codes, scales, rows, count, scales.shape[1], float(top),
            FLOATS=bool(floats), BLOCK=block, VALUES=_VALUES,
        )  # fmt: skip
    return rows
