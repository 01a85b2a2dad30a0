"""The base of all compressors: rows of fp32 numbers to columns of a wire format, and to their sum.

A row is what one rank sends to another. All rows of a call have the same length, and the shapes and
dtypes of columns follow from it (and from what the ranks agreed on): what a rank receives is laid
out as what it sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

Bias = Literal["exact", "unbiased", "biased"]
Columns = tuple[Tensor, ...]  # (R, ...) each, in the dtypes that are sent


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """One method with its options, which are the fields of its class."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, as of its models

    name: ClassVar[str]
    source: ClassVar[str]  # where the method comes from
    bias: ClassVar[Bias] = "biased"  # of a decoded value, over many draws
    extra_collectives: ClassVar[int] = 0  # for each exchange, besides the one of the bytes
    index_columns: ClassVar[int] = 0  # the first so many say where values belong
    work_bytes: ClassVar[int] = 14  # of a number, at the peak of an exchange, or less

    def for_ranks(self, ranks: int) -> Self:
        """Return what sums over so many ranks. Raises BadInput where that is impossible."""
        return self

    def proposal(self, rows: Tensor) -> Tensor | None:
        """Return a number of which all ranks need the largest before they encode; None: none."""
        return None

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Encode rows, (R, N) in fp32.

        `draws` is on the device of `rows`; `agreed` is the largest proposal of all ranks.
        """
        raise NotImplementedError

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Decode columns to (R, `count`) in fp32."""
        raise NotImplementedError

    def decode_sum(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Decode rows, one a rank, to their sum (`count`,) in fp32, from the first to the last, so
        that every rank gets the same bits. One at a time: between replicas each is as long as all
        gradients that are summed."""
        first, *others = zip(*(one.split(1) for one in sent), strict=True)
        total = self.decode(first, count, agreed)[0].clone()
        for row in others:
            total += self.decode(row, count, agreed)[0]
        return total

    def kept(self, count: int, agreed: float = 0.0) -> int:
        """Return how many of `count` values are sent, in whatever form."""
        return count

    def refuses_feedback(self) -> str:
        """Say why error feedback would diverge or be useless, with the cure; "": it does not."""
        return ""


def joined(columns: Columns) -> Tensor:
    """Return columns as rows of bytes, (R, bytes) of uint8."""
    return torch.cat([one.flatten(1).contiguous().view(torch.uint8) for one in columns], 1)


def columns_of(wire: Tensor, like: Columns) -> Columns:
    """Cut rows of bytes into columns of the shapes and dtypes of `like`."""
    parts = wire.split([one[0].nbytes for one in like], dim=1)
    return tuple(
        part.clone(memory_format=torch.contiguous_format).view(one.dtype).view(-1, *one.shape[1:])
        for part, one in zip(parts, like, strict=True)
    )


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """View rows (R, N) as (R, ceil(N / block), block), the last block filled up with zeros."""
    missing = -rows.shape[1] % block
    filled = torch.nn.functional.pad(rows, (0, missing))
    return filled.view(rows.shape[0], -1, block)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack (R, N) codes of 1, 2, 4 or 8 bits, uint8, into (R, ceil(N * bits / 8)) bytes."""
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (in_blocks(codes, 8 // bits) << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the (R, `count`) codes that `pack` packed."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count]


def mixed(numbers: Tensor) -> Tensor:
    """Hash whole numbers to 32 bits, the same on every device (murmur3's last steps)."""
    numbers = numbers & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        numbers = ((numbers ^ (numbers >> 16)) * factor) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


def drawn(like: Tensor, draws: torch.Generator) -> Tensor:
    """Draw numbers from 0 to 1, of the shape of `like`."""
    return torch.rand(like.shape, generator=draws, device=like.device, dtype=torch.float32)
