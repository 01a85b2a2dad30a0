"""The oracle of packed weights: what every faster implementation equals, bit for bit.

All arithmetic is in fp32, each operation rounded by itself, in the order written here.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fluxtrain.quantization.layout import BLOCK, MEMBER_ELEMENTS, NESTED, PackedLayout

# The 16 values of NF4: quantiles of the normal distribution, scaled to [-1, 1] (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# A value goes to the code whose index is the count of these that are less than it.
NF4_BORDERS = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544,
    -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
    0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683,
    0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
)  # fmt: skip
ZERO_CODE = 7
INT8_STEP = 7.874015718698502e-3  # 1 / 127 as bitsandbytes writes it


@lru_cache(maxsize=1)
def dynamic_map() -> Tensor:
    """Return the 256 values of the signed dynamic map, (256,) fp32, ascending.

    Of Dettmers 2015, "8-Bit Approximations for Parallelism in Deep Learning", with the values of
    bitsandbytes: 1, 2, 4 ... 64 of each sign in seven decades, 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        scaled = (10.0 ** (decade - 6) * means).tolist()
        values += scaled + [-value for value in scaled]
    return torch.tensor(sorted(values), dtype=torch.float32)


def nf4_codes(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise flat (N,), N a multiple of 64: codes (N / 2,) uint8 and absmax (N / 64,) fp32."""
    blocks = flat.float().view(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    scaled = blocks * (1.0 / absmax)[:, None]
    codes = torch.bucketize(scaled, torch.tensor(NF4_BORDERS), out_int32=True)
    codes.masked_fill_((absmax == 0)[:, None], ZERO_CODE)
    pairs = codes.view(-1, 2).to(torch.uint8)
    return (pairs[:, 0] << 4) | pairs[:, 1], absmax


def nested(absmax: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise absmax (N / 64,) of one weight, of which the first `count` are no padding.

    Returns codes (N / 64,) uint8, scales (N / 16384,) and the offset (), both fp32. The offset is
    the mean, summed in fp64.
    """
    real = absmax[:count].numpy().astype(np.float64)
    offset = torch.tensor(np.float32(real.sum() / max(count, 1)))
    centred = torch.zeros_like(absmax)
    centred[:count] = absmax[:count] - offset
    blocks = centred.view(-1, NESTED)
    scales = blocks.abs().amax(dim=1)
    values = dynamic_map()
    borders = (values[:-1] + values[1:]) / 2
    scaled = torch.where(scales[:, None] > 0, blocks * (1.0 / scales)[:, None], 0.0)
    return torch.bucketize(scaled, borders).to(torch.uint8).view(-1), scales, offset


def pack(layout: PackedLayout, index: int, weight: Tensor, packed: Tensor) -> None:
    """Write weight `index` (its shape, any floating dtype) into packed (size_bytes,) uint8."""
    place, arrays = layout.weights[index], layout.arrays(packed)
    if layout.format == "int8":
        _pack_int8(place.first, place.first_row, weight, arrays)
        return
    flat = torch.zeros(place.padded, dtype=torch.float32)
    flat[: place.count] = weight.detach().reshape(-1).float()
    codes, absmax = nf4_codes(flat)
    arrays["codes"][place.first // 2 :][: len(codes)] = codes
    put_absmax(layout, index, absmax, packed)


def put_absmax(layout: PackedLayout, index: int, absmax: Tensor, packed: Tensor) -> None:
    """Write the absolute maxima of weight `index`, (padded / 64,) fp32, in the format."""
    place, arrays = layout.weights[index], layout.arrays(packed)
    at = place.first // BLOCK
    if layout.format == "nf4":
        arrays["absmax"][at : at + len(absmax)] = absmax
        return
    codes, scales, offset = nested(absmax, -(-place.count // BLOCK))
    arrays["absmax"][at : at + len(codes)] = codes
    at = place.first // MEMBER_ELEMENTS
    arrays["scales"][at : at + len(scales)] = scales
    arrays["offsets"][at : at + len(scales)] = offset
    arrays["map"].copy_(dynamic_map())


def _pack_int8(first: int, first_row: int, weight: Tensor, arrays: dict[str, Tensor]) -> None:
    rows = weight.detach().reshape(-1, weight.shape[-1]).float()
    absmax = rows.abs().amax(dim=1)
    scaled = torch.where(absmax[:, None] > 0, rows * (127.0 / absmax)[:, None], 0.0)
    codes = arrays["codes"]
    codes[first : first + rows.numel()] = scaled.round().to(torch.int8).view(-1)
    arrays["absmax"][first_row : first_row + len(absmax)] = absmax


def unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    """Compute the dense form into out (elements,), bf16, fp16 or fp32; on any device."""
    arrays = layout.arrays(packed)
    if layout.format == "int8":
        _unpack_int8(layout, arrays, out)
        return
    absmax = arrays["absmax"]
    if layout.format == "nf4-double":
        spread = arrays["map"][absmax.int()].view(-1, NESTED)
        absmax = (spread * arrays["scales"][:, None] + arrays["offsets"][:, None]).view(-1)
    table = torch.tensor(NF4, device=packed.device)
    pairs = arrays["codes"]
    values = table[torch.stack((pairs >> 4, pairs & 15), dim=1).int()]
    out.view(-1, BLOCK).copy_(values.view(-1, BLOCK) * absmax[:, None])


def _unpack_int8(layout: PackedLayout, arrays: dict[str, Tensor], out: Tensor) -> None:
    for weight in layout.weights:
        codes = arrays["codes"][weight.first : weight.first + weight.count].view(weight.rows, -1)
        absmax = arrays["absmax"][weight.first_row : weight.first_row + weight.rows]
        dense = out[weight.first : weight.first + weight.count].view(weight.rows, -1)
        dense.copy_(codes.float() * absmax[:, None] * INT8_STEP)
        out[weight.first + weight.count : weight.first + weight.padded] = 0
