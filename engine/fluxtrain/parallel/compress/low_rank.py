"""Low-rank methods: a row is a matrix, and two thin factors of it are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fluxtrain.parallel.compress.compressor import Columns, Compressor, in_blocks


@dataclass(frozen=True, kw_only=True)
class GradiVeq(Compressor):
    """Slices of a row in the basis of their largest principal components."""

    name: ClassVar[str] = "gradiveq"
    source: ClassVar[str] = "GradiVeQ, arXiv 1811.03617, with a basis of each row sent with it"
    slice: Annotated[int, Field(ge=2, le=1024)] = 64
    components: Annotated[int, Field(ge=1, le=1024)] = 16

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send the basis in fp32, then the coefficients of each slice in bf16."""
        slices = in_blocks(rows, self.slice)
        vectors = torch.linalg.eigh(slices.transpose(1, 2) @ slices).eigenvectors
        basis = vectors[:, :, -min(self.components, self.slice) :]
        return basis, (slices @ basis).to(torch.bfloat16)

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply coefficients by the basis."""
        basis, coefficients = sent
        return (coefficients.float() @ basis.transpose(1, 2)).flatten(1)[:, :count]


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Two factors of low rank, by power iterations from random ones; in DDP torch's own."""

    name: ClassVar[str] = "powersgd"
    source: ClassVar[str] = "PowerSGD, arXiv 1905.13727, without a warm start; DDP: torch's hook"
    rank: Annotated[int, Field(ge=1, le=256)] = 4
    iterations: Annotated[int, Field(ge=1, le=8)] = 2

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send both factors in fp32: of a matrix that is about as high as wide."""
        height = max(1, math.isqrt(rows.shape[1]))
        width = -(-rows.shape[1] // height)
        padded = torch.nn.functional.pad(rows, (0, height * width - rows.shape[1]))
        matrix = padded.unflatten(1, (height, width))
        shape = (rows.shape[0], width, min(self.rank, height, width))
        left = right = torch.randn(shape, generator=draws, device=rows.device)
        for _ in range(self.iterations):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.transpose(1, 2) @ left
        return left, right

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply the factors."""
        left, right = sent
        return (left @ right.transpose(1, 2)).flatten(1)[:, :count]
