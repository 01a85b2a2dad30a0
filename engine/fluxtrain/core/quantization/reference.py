"""The oracle of packed weights: what every faster implementation equals, bit for bit.

All arithmetic is in fp32, each operation rounded by itself, in the order written here. It is that
of bitsandbytes' CUDA kernels (csrc, `kQuantizeBlockwise`): a product with the reciprocal, then a
search. Where bitsandbytes itself is less exact, codes differ from its own:

- On a CPU it looks codes of absolute maxima up in a table of 65,536 steps: 0.16 % are other ones,
  up to four apart near zero. In a last block that is not full it divides.
- On a GPU it is compiled for approximate reciprocals: a value next to a border may fall on its
  other side.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fluxtrain.core.quantization.layout import (
    BLOCK,
    MEMBER_ELEMENTS,
    NESTED,
    PackedLayout,
    PackedWeight,
)

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
PIECE_ELEMENTS = 1024 * MEMBER_ELEMENTS  # unpacked at once


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
    """Quantise flat (N,), N a multiple of 64; return codes (N / 2,) uint8 and absmax (N / 64,)
    fp32."""
    blocks = flat.float().view(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    inverse = _inverse(absmax)
    codes = torch.bucketize(blocks * inverse[:, None], torch.tensor(NF4_BORDERS), out_int32=True)
    codes.masked_fill_((inverse == 0)[:, None], ZERO_CODE)
    pairs = codes.view(-1, 2).to(torch.uint8)
    return (pairs[:, 0] << 4) | pairs[:, 1], absmax


def _inverse(largest: Tensor, factor: float = 1.0) -> Tensor:
    """Return (1 / largest) * factor, and 0 where it is not finite: what is so small counts as 0."""
    inverse = largest.reciprocal() * factor
    return torch.where(largest.isfinite() & inverse.isfinite(), inverse, 0.0)


@lru_cache(maxsize=1)
def nested_borders() -> Tensor:
    """Return the borders between the values of the dynamic map, (255,) fp32.

    A code is the count of these that are less than the value. What lies in the middle between two
    values goes to the even code, as bitsandbytes' search has it (`dQuantize`): such a border above
    an odd code is the number before it.
    """
    values = dynamic_map()
    borders = (values[:-1] + values[1:]) / 2
    borders[1::2] = torch.nextafter(borders[1::2], torch.tensor(-torch.inf))
    return borders


def mean(absmax: Tensor, count: int) -> Tensor:
    """Return the mean () of absmax (N / 64,), the sum of all over `count`, summed in fp64.

    16 interleaved sums of each 256, folded in halves, the sums of all 256 added in order.
    """
    sums = np.zeros((len(absmax) // NESTED, 16))
    for row in absmax.numpy().astype(np.float64).reshape(-1, 16, 16).swapaxes(0, 1):
        sums += row
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    total = np.add.accumulate(sums[:, 0])[-1] if len(sums) else 0.0
    return torch.tensor(np.float32(total / max(count, 1)))


def nested(absmax: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise absmax (N / 64,) of one weight, of which the first `count` are no padding.

    Returns codes (N / 64,) uint8, scales (N / 16384,) and the offset (), both fp32: the mean.
    """
    offset = mean(absmax, count)
    centred = torch.zeros_like(absmax)
    centred[:count] = absmax[:count] - offset
    blocks = centred.view(-1, NESTED)
    scales = blocks.abs().amax(dim=1)
    scaled = blocks * _inverse(scales)[:, None]
    return torch.bucketize(scaled, nested_borders()).to(torch.uint8).view(-1), scales, offset


def pack(layout: PackedLayout, index: int, weight: Tensor, packed: Tensor) -> None:
    """Write weight `index` (its shape, any floating dtype) into packed (size_bytes,) uint8.

    Padding behind it has the codes and the absmax of zero, gaps between arrays are zero.
    """
    place, arrays = layout.weights[index], layout.arrays(packed)
    zero_gaps(layout, packed)
    if layout.format == "int8":
        _pack_int8(place, weight, arrays)
        return
    flat = torch.zeros(place.padded, dtype=torch.float32)
    flat[: place.count] = weight.detach().reshape(-1).float()
    codes, absmax = nf4_codes(flat)
    arrays["codes"][place.first // 2 :][: len(codes)] = codes
    put_absmax(layout, index, absmax, packed)


def zero_gaps(layout: PackedLayout, packed: Tensor) -> None:
    """Write zeros between the arrays, so that all bytes of `packed` are defined."""
    for start, end in layout.gaps:
        packed[start:end] = 0


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


def _pack_int8(place: PackedWeight, weight: Tensor, arrays: dict[str, Tensor]) -> None:
    rows = weight.detach().reshape(-1, weight.shape[-1]).float()
    absmax = rows.abs().amax(dim=1)
    scaled = rows * _inverse(absmax, 127.0)[:, None]
    codes = arrays["codes"][place.first : place.first + place.padded]
    codes[: place.count] = scaled.round().to(torch.int8).view(-1)
    codes[place.count :] = 0
    arrays["absmax"][place.first_row : place.first_row + len(absmax)] = absmax


def unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    """Compute the dense form into out (elements,), bf16, fp16 or fp32; on any device.

    In pieces: besides `out` it takes at most 16 bytes for each of `PIECE_ELEMENTS`.
    """
    arrays = layout.arrays(packed)
    if layout.format == "int8":
        for weight in layout.weights:
            _unpack_int8(weight, arrays, out)
        return
    for first in range(0, layout.elements, PIECE_ELEMENTS):
        piece = slice(first, min(first + PIECE_ELEMENTS, layout.elements))
        _unpack_nf4(arrays, piece, out[piece])


def _unpack_nf4(arrays: dict[str, Tensor], piece: slice, out: Tensor) -> None:
    """Compute elements `piece`, whose bounds are multiples of 16384."""
    absmax = arrays["absmax"][piece.start // BLOCK : piece.stop // BLOCK]
    if "map" in arrays:  # nf4-double
        members = slice(piece.start // MEMBER_ELEMENTS, piece.stop // MEMBER_ELEMENTS)
        scales, offsets = arrays["scales"][members, None], arrays["offsets"][members, None]
        absmax = (arrays["map"][absmax.int()].view(-1, NESTED) * scales + offsets).view(-1)
    table = torch.tensor(NF4, device=out.device)
    pairs = arrays["codes"][piece.start // 2 : piece.stop // 2]
    values = table[torch.stack((pairs >> 4, pairs & 15), dim=1).int()]
    out.view(-1, BLOCK).copy_(values.view(-1, BLOCK) * absmax[:, None])


def _unpack_int8(weight: PackedWeight, arrays: dict[str, Tensor], out: Tensor) -> None:
    end = weight.first + weight.count
    codes = arrays["codes"][weight.first : end].view(weight.rows, -1)
    absmax = arrays["absmax"][weight.first_row : weight.first_row + weight.rows]
    dense = out[weight.first : end].view(weight.rows, -1)
    step = max(1, PIECE_ELEMENTS // weight.columns)
    for first in range(0, weight.rows, step):
        rows = slice(first, first + step)
        dense[rows] = codes[rows].float() * absmax[rows, None] * INT8_STEP
    out[end : weight.first + weight.padded] = 0
