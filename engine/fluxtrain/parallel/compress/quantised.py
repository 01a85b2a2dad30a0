"""Quantisers: every value is sent, in fewer bits."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.parallel.compress import triton_codes
from fluxtrain.parallel.compress.compressor import (
    Bias,
    Columns,
    Compressor,
    drawn,
    in_blocks,
    pack,
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

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Round to the dtype; beyond its largest number to that."""
        largest = torch.finfo(self.dtype).max
        return (rows.clamp(-largest, largest).to(self.dtype),)

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Widen to fp32."""
        return sent[0].float()

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
    num_bits: ClassVar[int] = 8
    _floats: ClassVar[bool | None] = None  # codes are 8-bit floats or whole numbers; None: drawn

    def _has_kernel(self, given: Tensor) -> bool:
        rounds = self._floats is not None and self.num_bits == 8
        return rounds and triton_codes.takes(given, self.block)

    def _top(self) -> float:
        """Return the largest value in units of the scale."""
        raise NotImplementedError

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        """Return the codes, uint8, of values divided by their scales, which are written over."""
        raise NotImplementedError

    def _values(self, codes: Tensor) -> Tensor:
        """Return the values, in units of the scale, of codes."""
        raise NotImplementedError

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send all codes, then all scales."""
        if self._has_kernel(rows):
            return triton_codes.encode(rows, self.block, self._top(), floats=self._floats)
        blocks = in_blocks(rows, self.block)
        scales = blocks.abs().amax(-1, keepdim=True) / self._top()
        scaled = blocks / torch.where(scales > 0, scales, 1.0)
        del blocks
        codes = self._codes(scaled, draws).flatten(1)[:, : rows.shape[1]]
        return pack(codes, self.num_bits), scales

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply each code's value by the scale of its block."""
        if self._has_kernel(sent[0]):
            codes, scales = sent
            return triton_codes.decode(codes, scales, self.block, self._top(), floats=self._floats)
        values = in_blocks(self._values(unpack(sent[0], self.num_bits, count)), self.block)
        values *= sent[1]
        return values.flatten(1)[:, :count]


class _Levels(_Scaled):
    """Whole numbers of so many bits, as many levels below zero as above."""

    def _top(self) -> int:
        return int(2 ** (self.num_bits - 1) - 1)

    def _values(self, codes: Tensor) -> Tensor:
        return codes.float().sub_(self._top())


@dataclass(frozen=True, kw_only=True)
class Int8(_Levels):
    """Whole numbers of 8 or 4 bits, rounded to the nearest."""

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "block-wise scales: arXiv 2110.02861; exchange: arXiv 2306.10209"
    num_bits: Literal[8, 4] = 8  # type: ignore[misc]
    _floats: ClassVar[bool] = False

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        return scaled.round_().add_(self._top()).to(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Fp8(_Scaled):
    """8-bit floating point, 4 bits of exponent and 3 of mantissa."""

    name: ClassVar[str] = "fp8"
    source: ClassVar[str] = "E4M3 of arXiv 2209.05433"
    _floats: ClassVar[bool] = True

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
    block: Block = 64  # half as many values share a scale as of int8: its error is the larger one
    num_bits: Literal[8, 4, 2] = 4  # type: ignore[misc]

    def _codes(self, scaled: Tensor, draws: torch.Generator) -> Tensor:
        top = self._top()
        drawn_up = scaled.add_(drawn(scaled, draws)).floor_()
        return drawn_up.clamp_(-top, top).add_(top).to(torch.uint8)

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
    work_bytes = 38
    source: ClassVar[str] = "natural compression, arXiv 1905.10988, exponents below the largest"
    bias: ClassVar[Bias] = "unbiased"

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send a byte a value, then the largest exponent of the row."""
        mantissa, exponent = torch.frexp(rows)  # mantissa from 0.5 to 1
        up = drawn(rows, draws) < 2 * mantissa.abs() - 1
        exponent = exponent - 1 + up
        top = torch.where(rows == 0, -1000, exponent).amax(1, keepdim=True).int()
        steps = exponent - top + 127  # 1 to 127; 0 is the value 0
        lost = (rows == 0) | (steps < 1)
        code = torch.where(lost, 0, steps) + 128 * (rows < 0)
        return code.to(torch.uint8), top

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Raise two to each exponent."""
        code, top = sent
        steps = (code & 127).int()
        value = torch.ldexp(torch.ones_like(steps, dtype=torch.float32), steps - 127 + top)
        return torch.where(steps == 0, 0.0, torch.where(code >= 128, -value, value))


@dataclass(frozen=True, kw_only=True)
class OneBit(Compressor):
    """The sign of each value; a block's signs stand for the means of its values of that sign."""

    name: ClassVar[str] = "onebit"
    work_bytes = 24
    source: ClassVar[str] = "1-bit SGD, Seide et al., Interspeech 2014"
    block: Block = 256

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send the signs, then two means a block."""
        blocks = in_blocks(rows, self.block)
        there = in_blocks(torch.ones_like(rows), self.block)
        above = (blocks >= 0) * there
        sides = (there - above, above)
        means = [(blocks * side).sum(-1) / side.sum(-1).clamp(min=1) for side in sides]
        return pack((rows >= 0).to(torch.uint8), 1), *means

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Put the means in place of the signs."""
        packed, low, high = sent
        above = in_blocks(unpack(packed, 1, count), self.block) == 1
        return torch.where(above, high[..., None], low[..., None]).flatten(1)[:, :count]


@dataclass(frozen=True, kw_only=True)
class SignSgd(Compressor):
    """The sign of each value, and of their sum the sign that most ranks sent; of zeros a random
    one."""

    name: ClassVar[str] = "signsgd"
    source: ClassVar[str] = "signSGD with majority vote, arXiv 1810.05291"

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send a bit a value."""
        coin = drawn(rows, draws) < 0.5
        return (pack(torch.where(rows == 0, coin, rows > 0).to(torch.uint8), 1),)

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Return 1 and -1."""
        return unpack(sent[0], 1, count).float() * 2 - 1

    def decode_sum(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Return the majority's sign for each rank, and 0 where there is none."""
        return super().decode_sum(sent, count, agreed).sign() * sent[0].shape[0]

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

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Round to the nearest of the levels."""
        return ((rows * (self.levels / agreed if agreed else 0.0)).round().to(torch.int8),)

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Multiply by the scale."""
        return sent[0].float() * (agreed / self.levels)

    def decode_sum(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Add up in int8, which cannot overflow, then multiply by the scale."""
        return self.decode((sent[0].sum(0, dtype=torch.int8),), count, agreed)


ALONE = (Fp16, Bf16, Int8, Fp8, Qsgd, Natural, OneBit, SignSgd)  # without an agreement of ranks
