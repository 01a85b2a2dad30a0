"""Low-rank methods: a row is a matrix, and two thin factors of it are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fluxtrain.parallel.compress.compressor import (
    FP32_BYTES,
    Bias,
    Compressor,
    as_bytes,
    as_numbers,
    in_blocks,
    parts,
)

_COEFFICIENT_BYTES = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class GradiVeq(Compressor):
    """Slices of a row in the basis of their largest principal components."""

    name: ClassVar[str] = "gradiveq"
    source: ClassVar[str] = "GradiVeQ, arXiv 1811.03617, with a basis of each row sent with it"
    bias: ClassVar[Bias] = "biased"
    slice: Annotated[int, Field(ge=2, le=1024)] = 64
    components: Annotated[int, Field(ge=1, le=1024)] = 16

    def _components(self) -> int:
        return min(self.components, self.slice)

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Send the basis in fp32, then the coefficients of each slice in bf16."""
        slices = in_blocks(rows, self.slice)
        vectors = torch.linalg.eigh(slices.transpose(1, 2) @ slices).eigenvectors
        basis = vectors[:, :, -self._components() :]
        coefficients = (slices @ basis).to(torch.bfloat16)
        return torch.cat([as_bytes(basis.flatten(1)), as_bytes(coefficients.flatten(1))], 1)

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply coefficients by the basis."""
        basis_bytes = self.slice * self._components() * FP32_BYTES
        sent, rest = parts(wire, basis_bytes, wire.shape[1] - basis_bytes)
        basis = as_numbers(sent, torch.float32).view(wire.shape[0], self.slice, -1)
        coefficients = as_numbers(rest, torch.bfloat16).float()
        coefficients = coefficients.view(wire.shape[0], -1, self._components())
        return (coefficients @ basis.transpose(1, 2)).flatten(1)[:, :count]


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Two factors of low rank, by power iterations from random ones; in DDP torch's own."""

    name: ClassVar[str] = "powersgd"
    source: ClassVar[str] = "PowerSGD, arXiv 1905.13727, without a warm start; DDP: torch's hook"
    bias: ClassVar[Bias] = "biased"
    rank: Annotated[int, Field(ge=1, le=256)] = 4
    iterations: Annotated[int, Field(ge=1, le=8)] = 2

    def _shape(self, count: int) -> tuple[int, int, int]:
        """Return height, width and rank of the matrix."""
        height = max(1, math.isqrt(count))
        width = -(-count // height)
        return height, width, min(self.rank, height, width)

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Send both factors in fp32."""
        height, width, rank = self._shape(rows.shape[1])
        padded = torch.nn.functional.pad(rows, (0, height * width - rows.shape[1]))
        matrix = padded.unflatten(1, (height, width))
        shape = (rows.shape[0], width, rank)
        right = torch.randn(shape, generator=draws, device=rows.device)
        left = right
        for _ in range(self.iterations):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.transpose(1, 2) @ left
        return torch.cat([as_bytes(left.flatten(1)), as_bytes(right.flatten(1))], 1)

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply the factors."""
        height, width, rank = self._shape(count)
        sizes = (height * rank * FP32_BYTES, width * rank * FP32_BYTES)
        left, right = (as_numbers(part, torch.float32) for part in parts(wire, *sizes))
        right = right.view(-1, width, rank)
        matrix = left.view(-1, height, rank) @ right.transpose(1, 2)
        return matrix.flatten(1)[:, :count]
