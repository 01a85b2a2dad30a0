"""The base of all compressors: rows of fp32 numbers to rows of bytes, and back to their sum.

A row is what one rank sends to another. All rows of a call have the same length, and the bytes of
an encoded row depend on its length alone (and on what the ranks agreed on), so that every rank
knows the size of what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

Bias = Literal["exact", "unbiased", "biased"]
INT32_BYTES = FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """One method with its options, which are the fields of its class."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, as of its models

    name: ClassVar[str]
    source: ClassVar[str]  # where the method comes from
    bias: ClassVar[Bias]  # of a decoded value, over many draws
    extra_collectives: ClassVar[int] = 0  # for each exchange, besides the one of the bytes

    def for_ranks(self, ranks: int) -> Self:
        """Return what sums over so many ranks. Raises BadInput where that is impossible."""
        return self

    def proposal(self, rows: Tensor) -> Tensor | None:
        """Return a number of which all ranks need the largest before they encode; None: none."""
        return None

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Encode rows, (R, N) in fp32, as (R, bytes) of uint8; the bytes follow from N.

        `draws` is on the device of `rows`; `agreed` is the largest proposal of all ranks.
        """
        raise NotImplementedError

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Decode rows of bytes to (R, `count`) in fp32."""
        raise NotImplementedError

    def decode_sum(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Decode rows of bytes, one a rank, to the sum (`count`,) in fp32, in order of the rows."""
        return sum_in_order(self.decode(wire, count, agreed))

    def index_bytes(self, count: int, agreed: float = 0.0) -> int:
        """Return how many of the bytes say where values belong."""
        return 0

    def kept(self, count: int, agreed: float = 0.0) -> int:
        """Return how many of `count` values are sent, in whatever form."""
        return count

    def refuses_feedback(self) -> str:
        """Say why error feedback would diverge or be useless, with the cure; "": it does not."""
        return ""


def sum_in_order(rows: Tensor) -> Tensor:
    """Add up rows (R, N) from the first to the last, so that every rank gets the same bits."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of (R, N) numbers as (R, N times their size) of uint8."""
    return tensor.contiguous().view(torch.uint8)


def as_numbers(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows of bytes as numbers of `dtype`."""
    return wire.clone(memory_format=torch.contiguous_format).view(dtype)


def parts(wire: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Cut rows of bytes into columns of these sizes."""
    columns: tuple[Tensor, ...] = wire.split(list(sizes), dim=1)
    return columns


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """View rows (R, N) as (R, ceil(N / block), block), the last block filled up with zeros."""
    missing = -rows.shape[1] % block
    filled = torch.nn.functional.pad(rows, (0, missing))
    return filled.view(rows.shape[0], -1, block)


def blocks_of(count: int, block: int) -> int:
    """Return how many blocks hold `count` numbers."""
    return -(-count // block)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack (R, N) codes of 1, 2, 4 or 8 bits, uint8, into (R, ceil(N * bits / 8)) bytes."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    grouped = in_blocks(codes, per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (grouped << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the (R, `count`) codes that `pack` packed."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count]


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` packed codes."""
    return blocks_of(count * bits, 8)


def mixed(numbers: Tensor) -> Tensor:
    """Hash whole numbers to 32 bits, the same on every device (murmur3's last steps)."""
    numbers = numbers & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        numbers = ((numbers ^ (numbers >> 16)) * factor) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


def drawn(like: Tensor, draws: torch.Generator) -> Tensor:
    """Draw numbers from 0 to 1, of the shape of `like`."""
    return torch.rand(like.shape, generator=draws, device=like.device, dtype=torch.float32)
