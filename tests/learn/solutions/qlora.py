import torch
from torch import Tensor

BLOCK = 64
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = blocks / absmax[:, None]
    codes = (scaled[..., None] - NF4).abs().argmin(-1).flatten()
    return ((codes[::2] << 4) | codes[1::2]).to(torch.uint8), absmax


def dequantize(codes: Tensor, absmax: Tensor, shape: torch.Size) -> Tensor:
    both = torch.stack([codes >> 4, codes & 15], 1).flatten().long()
    return (NF4[both].view(-1, BLOCK) * absmax[:, None]).view(shape)
