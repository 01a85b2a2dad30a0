"""Task 2: a base in 4 bits."""

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
    """Return codes (N / 2,) uint8 and absmax (N / 64,) fp32 of a weight with N elements."""
    raise NotImplementedError


def dequantize(codes: Tensor, absmax: Tensor, shape: torch.Size) -> Tensor:
    """Return the weight that codes and scales stand for."""
    raise NotImplementedError
