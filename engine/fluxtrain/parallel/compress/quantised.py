"""Quantisers: every value is sent, in fewer bits."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.parallel.compress.compressor import (
    FP32_BYTES,
    INT32_BYTES,
    Bias,
    Compressor,
    as_bytes,
    as_numbers,
    blocks_of,
    drawn,
    in_blocks,
    pack,
    packed_bytes,
    parts,
    unpack,
)

_LEAST_BLOCK = 8
Block = Annotated[int, Field(ge=_LEAST_BLOCK, le=1 << 20)]


@dataclass(frozen=True, kw_only=True)
class Plain(Compressor):
    """Values as they are, in fp32."""

    name: ClassVar[str] = "none"
    source: ClassVar[str] = "torch"
    bias: ClassVar[Bias] = "exact"
    dtype: ClassVar[torch.dtype] = torch.float32

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Round to the dtype; beyond its largest number to that."""
        largest = torch.finfo(self.dtype).max
        return as_bytes(rows.clamp(-largest, largest).to(self.dtype))

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Widen to fp32."""
        return as_numbers(wire, self.dtype).float()

    def refuses_feedback(self) -> str:
        """Refuse: torch reduces these itself, and what rounding loses is hardly worth a copy."""
        return f"{self.name} is torch's own reduction: take feedback off, or take int8"


@dataclass(frozen=True, kw_only=True)
class Fp16(Plain):
    """IEEE half precision; `reduce_dtype` of FSDP2, torch's hook of DDP."""

    name: ClassVar[str] = "fp16"
    bias: ClassVar[Bias] = "biased"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class Bf16(Plain):
    """bfloat16; `reduce_dtype` of FSDP2, torch's hook of DDP."""

    name: ClassVar[str] = "bf16"
    bias: ClassVar[Bias] = "biased"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class _Scaled(Compressor):
    """Codes of a fixed number of bits, with an fp32 scale for each block of a row."""

    block: Block = 128

    def _bits(self) -> int:
        return 8

    def _top(self) -> float:
        """Return the largest value in units of the scale."""
        raise NotImplementedError

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        """Return the codes, uint8, of values divided by their scales."""
        raise NotImplementedError

    def _values(self, codes: Tensor) -> Tensor:
        """Return the values, in units of the scale, of codes."""
        raise NotImplementedError

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Send all codes, then all scales."""
        blocks = in_blocks(rows, self.block)
        scales = blocks.abs().amax(-1, keepdim=True) / self._top()
        scaled = blocks / torch.where(scales > 0, scales, 1.0)
        codes = self._codes(scaled, draws).flatten(1)[:, : rows.shape[1]]
        return torch.cat([pack(codes, self._bits()), as_bytes(scales.squeeze(-1))], 1)

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply each code's value by the scale of its block."""
        sent = packed_bytes(count, self._bits())
        packed, scales = parts(wire, sent, wire.shape[1] - sent)
        codes = unpack(packed, self._bits(), count)
        values = in_blocks(self._values(codes), self.block)
        return (values * as_numbers(scales, torch.float32).unsqueeze(-1)).flatten(1)[:, :count]


@dataclass(frozen=True, kw_only=True)
class _Levels(_Scaled):
    """Whole numbers of so many bits, as many levels below zero as above."""

    num_bits: Literal[8, 4, 2]

    def _bits(self) -> int:
        return self.num_bits

    def _top(self) -> int:
        return int(2 ** (self.num_bits - 1) - 1)

    def _values(self, codes: Tensor) -> Tensor:
        return codes.float() - self._top()


@dataclass(frozen=True, kw_only=True)
class Int8(_Levels):
    """Whole numbers of 8 or 4 bits, rounded to the nearest."""

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "block-wise scales: arXiv 2110.02861; exchange: arXiv 2306.10209"
    bias: ClassVar[Bias] = "biased"
    num_bits: Literal[8, 4] = 8

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        return (scaled.round() + self._top()).to(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Fp8(_Scaled):
    """8-bit floating point, 4 bits of exponent and 3 of mantissa."""

    name: ClassVar[str] = "fp8"
    source: ClassVar[str] = "E4M3 of arXiv 2209.05433"
    bias: ClassVar[Bias] = "biased"

    def _top(self) -> float:
        return torch.finfo(torch.float8_e4m3fn).max

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _values(self, codes: Tensor) -> Tensor:
        return codes.contiguous().view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, kw_only=True)
class Qsgd(_Levels):
    """Levels drawn so that their mean is the value; scaled by the largest value of a block."""

    name: ClassVar[str] = "qsgd"
    source: ClassVar[str] = "QSGD, arXiv 1610.02132, with the largest value as norm"
    bias: ClassVar[Bias] = "unbiased"
    num_bits: Literal[8, 4, 2] = 4

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        top = self._top()
        level = (scaled + drawn(scaled, draws)).floor().clamp(-top, top)
        return (level + top).to(torch.uint8)

    def refuses_feedback(self) -> str:
        """Refuse where the error may be larger than the value: block / (4 levels^2) of its
        square."""
        most = 4 * self._top() ** 2 - 1
        if self.block <= most:
            return ""
        cure = f"take blocks of at most {most}" if most >= _LEAST_BLOCK else "take more num_bits"
        return (
            f"the squared error of qsgd with {self.num_bits} bits and blocks of {self.block} may "
            f"be {self.block / (most + 1):.2g} times the gradient's, so that residuals grow from "
            f"step to step: {cure}"
        )


@dataclass(frozen=True, kw_only=True)
class Natural(Compressor):
    """Powers of two, drawn so that their mean is the value: a sign and 7 bits of exponent."""

    name: ClassVar[str] = "nc"
    source: ClassVar[str] = "natural compression, arXiv 1905.10988, exponents below the largest"
    bias: ClassVar[Bias] = "unbiased"

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Send a byte a value, then the largest exponent of the row."""
        mantissa, exponent = torch.frexp(rows)  # mantissa from 0.5 to 1
        up = drawn(rows, draws) < 2 * mantissa.abs() - 1
        exponent = exponent - 1 + up
        top = torch.where(rows == 0, -1000, exponent).amax(1, keepdim=True).int()
        steps = exponent - top + 127  # 1 to 127; 0 is the value 0
        lost = (rows == 0) | (steps < 1)
        code = torch.where(lost, 0, steps) + 128 * (rows < 0)
        return torch.cat([code.to(torch.uint8), as_bytes(top)], 1)

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Raise two to each exponent."""
        code, top = parts(wire, count, INT32_BYTES)
        steps = (code & 127).int()
        exponent = steps - 127 + as_numbers(top, torch.int32)
        value = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        return torch.where(steps == 0, 0.0, torch.where(code >= 128, -value, value))


@dataclass(frozen=True, kw_only=True)
class OneBit(Compressor):
    """The sign of each value; a block's signs stand for the means of its values of that sign."""

    name: ClassVar[str] = "onebit"
    source: ClassVar[str] = "1-bit SGD, Seide et al., Interspeech 2014"
    bias: ClassVar[Bias] = "biased"
    block: Block = 256

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Send the signs, then two means a block."""
        count = rows.shape[1]
        blocks = in_blocks(rows, self.block)
        there = in_blocks(torch.ones_like(rows), self.block)
        above = (blocks >= 0) * there
        below = there - above
        means = [(blocks * side).sum(-1) / side.sum(-1).clamp(min=1) for side in (below, above)]
        signs = (rows >= 0).to(torch.uint8)
        return torch.cat([pack(signs, 1)[:, : packed_bytes(count, 1)], *map(as_bytes, means)], 1)

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Put the means in place of the signs."""
        scales = blocks_of(count, self.block) * FP32_BYTES
        packed, *means = parts(wire, packed_bytes(count, 1), scales, scales)
        above = in_blocks(unpack(packed, 1, count), self.block) == 1
        low, high = (as_numbers(mean, torch.float32).unsqueeze(-1) for mean in means)
        return torch.where(above, high, low).flatten(1)[:, :count]


@dataclass(frozen=True, kw_only=True)
class SignSgd(Compressor):
    """The sign of each value, and of their sum the sign that most ranks sent; of zeros a random
    one."""

    name: ClassVar[str] = "signsgd"
    source: ClassVar[str] = "signSGD with majority vote, arXiv 1810.05291"
    bias: ClassVar[Bias] = "biased"

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Send a bit a value."""
        coin = drawn(rows, draws) < 0.5
        return pack(torch.where(rows == 0, coin, rows > 0).to(torch.uint8), 1)

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Return 1 and -1."""
        return unpack(wire, 1, count).float() * 2 - 1

    def decode_sum(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Return the majority's sign for each rank, and 0 where there is none."""
        return self.decode(wire, count).sum(0).sign() * wire.shape[0]

    def refuses_feedback(self) -> str:
        """Refuse: signs have no scale."""
        return (
            "signsgd sends 1 and -1 whatever the size of a gradient, so that residuals grow from "
            "step to step: take onebit, whose signs have a scale"
        )


@dataclass(frozen=True, kw_only=True)
class Int8Sum(Compressor):
    """Whole numbers with one scale for all ranks, so few that their sum fits 8 bits."""

    name: ClassVar[str] = "int8_sum"
    source: ClassVar[str] = "127 // ranks levels, summed in int8"
    bias: ClassVar[Bias] = "biased"
    extra_collectives: ClassVar[int] = 1
    levels: int = field(default=127, init=False)

    def for_ranks(self, ranks: int) -> Self:
        """Leave each rank its share of 127 levels."""
        if ranks > 127:
            raise BadInput(
                f"comm.compress=int8_sum leaves 127 // {ranks} = 0 levels for {ranks} ranks: "
                "take int8"
            )
        bound = copy(self)
        object.__setattr__(bound, "levels", 127 // ranks)
        return bound

    def proposal(self, rows: Tensor) -> Tensor:
        """Return the largest value."""
        return rows.abs().amax()

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Tensor:
        """Round to the nearest of the levels."""
        per_value = self.levels / agreed if agreed else 0.0
        return as_bytes((rows * per_value).round().to(torch.int8))

    def decode(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply by the scale."""
        return as_numbers(wire, torch.int8).float() * (agreed / self.levels)

    def decode_sum(self, wire: Tensor, count: int, agreed: float = 0.0) -> Tensor:
        """Add up in int8, which cannot overflow, then multiply by the scale."""
        total = as_numbers(wire, torch.int8).sum(0, dtype=torch.int8)
        return total.float() * (agreed / self.levels)


ALONE = (Fp16, Bf16, Int8, Fp8, Qsgd, Natural, OneBit, SignSgd)  # without an agreement of ranks
