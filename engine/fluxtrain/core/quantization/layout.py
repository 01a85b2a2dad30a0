"""Where the arrays of a packed segment lie: codes, absolute maxima, scales.

A packed segment holds frozen weights of one dtype. Its dense form is one flat range of elements in
which each weight is padded to `MEMBER_ELEMENTS`; its packed form is one range of bytes, with the
arrays of the format one after the other, each aligned to 64 bytes:

| format | bytes an element | arrays of a dense range of N elements |
|---|---|---|
| nf4 | 0.5625 | codes (N / 2) uint8: two a byte, the first in its upper four bits; |
| | | absmax (N / 64) fp32 |
| nf4-double | 0.516 | codes as above; absmax (N / 64) uint8; |
| | | scales and offsets (N / 16384) fp32; map (256) fp32 |
| int8 | 1 + 4 / columns | codes (N) int8; absmax of each row (rows) fp32 |

nf4 is of Dettmers et al. 2023 (QLoRA, https://arxiv.org/abs/2305.14314), int8 of Dettmers et al.
2022 (LLM.int8(), https://arxiv.org/abs/2208.07339), here for the weights alone. Codes, blocks and
arithmetic are those of bitsandbytes, so that its quantised models can be taken over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from fluxtrain.plan.states import PackedFormat

BLOCK = 64  # elements with one absolute maximum
NESTED = 256  # absolute maxima with one scale and one offset
MEMBER_ELEMENTS = BLOCK * NESTED  # a weight is padded to a multiple of it
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Place:
    """One array of a packed segment."""

    dtype: torch.dtype
    count: int
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Count its bytes."""
        return self.count * self.dtype.itemsize

    def of(self, packed: Tensor) -> Tensor:
        """Return the array in `packed` (bytes,) uint8."""
        return packed[self.offset_bytes :][: self.size_bytes].view(self.dtype)


@dataclass(frozen=True)
class PackedWeight:
    """One weight in a packed segment."""

    shape: tuple[int, ...]
    first: int  # its first element in the dense form
    first_row: int  # its first row among all rows

    @property
    def count(self) -> int:
        """Count its elements."""
        return prod(self.shape)

    @property
    def columns(self) -> int:
        """Count the elements of a row: of the last dimension."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Count the rows."""
        return self.count // self.columns

    @property
    def padded(self) -> int:
        """Count its elements with the padding behind them."""
        return padded(self.count)


@dataclass(frozen=True)
class PackedLayout:
    """The weights of a packed segment, and where its arrays lie."""

    format: PackedFormat
    weights: tuple[PackedWeight, ...]

    @staticmethod
    def of(format: PackedFormat, shapes: Sequence[Sequence[int]]) -> PackedLayout:
        """Lay out weights of these shapes, in this order."""
        first, first_row, weights = 0, 0, []
        for shape in shapes:
            weights.append(PackedWeight(tuple(shape), first, first_row))
            first += weights[-1].padded
            first_row += weights[-1].rows
        return PackedLayout(format, tuple(weights))

    @cached_property
    def elements(self) -> int:
        """Count the elements of the dense form."""
        return sum(weight.padded for weight in self.weights)

    @cached_property
    def rows(self) -> int:
        """Count the rows of all weights."""
        return sum(weight.rows for weight in self.weights)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Return the place of each array, by name."""
        offset, found = 0, {}
        for name, (dtype, count) in self._arrays().items():
            found[name] = Place(dtype, count, offset)
            offset += -(-count * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        return found

    @cached_property
    def size_bytes(self) -> int:
        """Count the bytes of the packed form."""
        last = list(self.places.values())[-1]
        return last.offset_bytes + last.size_bytes

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the bytes [start, end) between the arrays."""
        ends = [place.offset_bytes + place.size_bytes for place in self.places.values()]
        starts = [place.offset_bytes for place in self.places.values()][1:]
        return tuple(
            (end, start) for end, start in zip(ends[:-1], starts, strict=True) if end < start
        )

    def arrays(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the arrays in `packed` (size_bytes,) uint8 by name."""
        return {name: place.of(packed) for name, place in self.places.items()}

    def arrays_of(self, index: int, packed: Tensor) -> dict[str, Tensor]:
        """Return weight `index`'s arrays in `packed` (size_bytes,), without padding."""
        weight, arrays = self.weights[index], self.arrays(packed)
        if self.format == "int8":
            rows = slice(weight.first_row, weight.first_row + weight.rows)
            codes = arrays["codes"][weight.first : weight.first + weight.count]
            return {"codes": codes, "absmax": arrays["absmax"][rows]}
        spans = {
            "codes": (weight.first // 2, -(-weight.count // 2)),
            "absmax": (weight.first // BLOCK, -(-weight.count // BLOCK)),
            "scales": (weight.first // MEMBER_ELEMENTS, weight.padded // MEMBER_ELEMENTS),
            "offsets": (weight.first // MEMBER_ELEMENTS, weight.padded // MEMBER_ELEMENTS),
            "map": (0, 256),
        }
        return {
            name: array[spans[name][0] : spans[name][0] + spans[name][1]]
            for name, array in arrays.items()
        }

    def _arrays(self) -> dict[str, tuple[torch.dtype, int]]:
        n = self.elements
        if self.format == "int8":
            return {"codes": (torch.int8, n), "absmax": (torch.float32, self.rows)}
        codes = {"codes": (torch.uint8, n // 2)}
        if self.format == "nf4":
            return codes | {"absmax": (torch.float32, n // BLOCK)}
        return codes | {
            "absmax": (torch.uint8, n // BLOCK),
            "scales": (torch.float32, n // MEMBER_ELEMENTS),
            "offsets": (torch.float32, n // MEMBER_ELEMENTS),
            "map": (torch.float32, 256),
        }


def padded(count: int) -> int:
    """Return the elements that a weight of `count` elements takes in the dense form."""
    return -(-count // MEMBER_ELEMENTS) * MEMBER_ELEMENTS


def packed_bytes(format: PackedFormat, shapes: Sequence[Sequence[int]]) -> int:
    """Count the bytes of weights of these shapes in a packed segment."""
    return PackedLayout.of(format, shapes).size_bytes
