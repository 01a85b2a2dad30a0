"""Optimizer states of a segment on disk: cut into pieces, each with all its arrays in one record.

    piece 0 [ lo | m | v (| scales) ]  piece 1 [ lo | m | v (| scales) ]  ...

Its weights can be there, too, in front of the states, and gradients behind them, each in blocks of
their own: uploads read the weights alone, and gradients are not written back.

    piece 0 [ weights | lo | m | v | gradient ]  ...

An update changes one piece after the other in the buffers of `Spill`. Everybody else sees tensors
without memory (`OnDisk`), which are written by `copy_` and `zero_` and read by `load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device.arena import aligned
from fluxtrain.core.device.spill import Record, Spill, apart, block_elements, in_pages
from fluxtrain.plan.states import STATE_BLOCK

PIECE_STEP = 4096  # elements: a multiple of STATE_BLOCK
WEIGHTS, GRADIENT = "weights", "gradient"  # names of arrays that are no states

Wanted = Mapping[str, tuple[torch.dtype, int]]  # dtype and count of each array, by name


@dataclass(frozen=True)
class Piece:
    """The arrays of the elements from `start` to `stop` of a segment."""

    start: int
    stop: int
    record: Record
    arrays: dict[str, tuple[torch.dtype, int, int]]  # dtype, elements, offset in bytes

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the arrays in the bytes of its record, by name."""
        return {
            name: buffer[offset : offset + count * dtype.itemsize].view(dtype)
            for name, (dtype, count, offset) in self.arrays.items()
        }


@dataclass(frozen=True)
class PieceFile:
    """The weights of a piece, as a file that begins with them (`core/device/disk.py`)."""

    spill: Spill
    record: Record
    size_bytes: int

    def read(self, number: int, into: Tensor) -> None:
        """Read a block to the beginning of `into`, once the record is written. Raises
        ReadFailed."""
        self.spill.read_block(self.record, number, into)


class StatesOnDisk:
    """All optimizer states of one segment, zero at first, and what else of it is wanted on disk."""

    def __init__(self, wanted: Wanted, elements: int, spill: Spill) -> None:
        """Take the room on disk. Raises as `Spill.make_room`."""
        self.spill = spill
        self.pieces: list[Piece] = []
        for start, stop, arrays, size_bytes in _cut(wanted, elements, spill.record_bytes):
            record = spill.record(size_bytes)
            if GRADIENT in arrays:
                record.keep(arrays[GRADIENT][2])
            self.pieces.append(Piece(start, stop, record, arrays))
        self._wanted = wanted
        self.begun = False  # whether the states are used: there are weights before the first step

    def has(self, name: str) -> bool:
        """Return whether an array is there."""
        return name in self._wanted

    def files(self) -> list[tuple[int, PieceFile]]:
        """Return the weights of each piece, with the offset of their bytes in the segment."""
        found: list[tuple[int, PieceFile]] = []
        for piece in self.pieces if self.has(WEIGHTS) else ():
            dtype, count, offset = piece.arrays[WEIGHTS]
            assert offset == 0
            file = PieceFile(self.spill, piece.record, count * dtype.itemsize)
            found.append((piece.start * dtype.itemsize, file))
        return found

    def whole(self, name: str) -> OnDisk:
        """Return an array, with the elements of the segment."""
        stop = self._wanted[name][1]
        return self._handle(name, slice(0, stop), None)

    def of_range(self, name: str, start: int, stop: int, shape: torch.Size) -> OnDisk:
        """Return a range of an array, in `shape`."""
        return self._handle(name, slice(start, stop), shape)

    def handles(self, start: int, stop: int, shape: torch.Size | None = None) -> dict[str, OnDisk]:
        """Return the states of a range of elements: scales (blocks,), the others in `shape`."""
        found: dict[str, OnDisk] = {}
        for name in self._wanted if self.begun else ():
            if name not in (WEIGHTS, GRADIENT):
                step = _elements_of_one(name)
                part = slice(start // step, -(-stop // step))
                found[name] = self._handle(name, part, None if step > 1 else shape)
        return found

    def _handle(self, name: str, part: slice, shape: torch.Size | None) -> OnDisk:
        flat = torch.empty(part.stop - part.start, dtype=self._wanted[name][0], device="meta")
        there = flat if shape is None else flat.view(shape)
        return there.as_subclass(OnDisk).at(self, name, part)

    def parts(self, name: str, part: slice) -> Iterator[tuple[Record, int, slice]]:
        """Yield where a range of an array lies: the record, the first byte in it, and its place in
        the range."""
        at = 0  # entries of the array before this piece
        for piece in self.pieces:
            dtype, count, offset = piece.arrays[name]
            first, stop = max(at, part.start), min(at + count, part.stop)
            if first < stop:
                start_bytes = offset + (first - at) * dtype.itemsize
                yield piece.record, start_bytes, slice(first - part.start, stop - part.start)
            at += count

    def give_back(self) -> None:
        """Let others use the room."""
        self.spill.give_back([piece.record for piece in self.pieces])
        self.pieces = []


class OnDisk(Tensor):
    """A state without memory: its values are on disk. To torch it is on the meta device, so that
    what would compute with it fails."""

    device = torch.device("cpu")  # where its values come to
    _states: StatesOnDisk
    _name: str
    _part: slice

    def at(self, states: StatesOnDisk, name: str, part: slice) -> OnDisk:
        """Set which entries of which array these are."""
        self._states, self._name, self._part = states, name, part
        return self

    @property
    def place(self) -> tuple[int, str, int]:
        """Return what two handles of the same values share."""
        return id(self._states), self._name, self._part.start

    def pieces(self) -> Iterator[Tensor]:
        """Read the values piece by piece, in order. Raises ReadFailed."""
        for record, start, place in self._states.parts(self._name, self._part):
            flat = torch.empty(place.stop - place.start, dtype=self.dtype)
            self._states.spill.read(record, start, flat.view(torch.uint8))
            yield flat

    def load(self) -> Tensor:
        """Return the values in host memory. Raises ReadFailed."""
        flat = torch.empty(self.numel(), dtype=self.dtype)
        self.load_into(flat)
        return flat.view(self.shape)

    def mapped(self) -> Tensor:
        """Return a copy of the values in a file, for code that wants a tensor and may not have the
        memory. Raises ReadFailed, NoSpace."""
        pages = self._states.spill.mapping(self.nbytes)
        flat = torch.frombuffer(pages, dtype=self.dtype, count=self.numel())
        self.load_into(flat)
        return flat.view(self.shape)

    def load_into(self, flat: Tensor) -> None:
        """Copy the values to memory (n,) anywhere. Raises ReadFailed."""
        at = 0
        for piece in self.pieces():
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()

    def copy_(self, source: Tensor, non_blocking: bool = False) -> OnDisk:
        """Write as many values."""
        assert source.numel() == self.numel()
        flat = source.detach().reshape(-1)
        for record, start, place in self._states.parts(self._name, self._part):
            part = flat[place].to("cpu", self.dtype).contiguous().view(torch.uint8)
            self._states.spill.write(record, start, part)
        return self

    def zero_(self) -> OnDisk:
        """Write zeros."""
        for record, start, place in self._states.parts(self._name, self._part):
            size_bytes = (place.stop - place.start) * self.dtype.itemsize
            zeros = torch.zeros(size_bytes, dtype=torch.uint8)
            self._states.spill.write(record, start, zeros)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.load()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)


def loaded(state: Tensor) -> Tensor:
    """Return a state in memory: itself, or a copy of what is on disk."""
    return state.load() if isinstance(state, OnDisk) else state


def record_sizes(wanted: Wanted, elements: int, record_bytes: int) -> list[int]:
    """Return the size in bytes of each record (about `record_bytes`) of optimizer states."""
    return [in_pages(size) for *_, size in _cut(wanted, elements, record_bytes)]


def _elements_of_one(name: str) -> int:
    return STATE_BLOCK if name.endswith("_scale") else 1


def _cut(
    wanted: Wanted, elements: int, record_bytes: int
) -> Iterator[tuple[int, int, dict[str, tuple[torch.dtype, int, int]], int]]:
    """Yield start, stop, arrays and bytes of each piece, `record_bytes` at most."""
    total = sum(dtype.itemsize * count for dtype, count in wanted.values())
    fit = record_bytes * elements // max(1, total) - STATE_BLOCK
    step = max(PIECE_STEP, fit // PIECE_STEP * PIECE_STEP)
    while step > PIECE_STEP and _arrays(wanted, min(step, elements))[1] > record_bytes:
        step -= PIECE_STEP
    for name in {WEIGHTS, GRADIENT} & wanted.keys():  # whole blocks of these, where they fill some
        step -= step % whole if step >= (whole := block_elements(wanted[name][0].itemsize)) else 0
    for start in range(0, elements, step):
        stop = min(start + step, elements)
        yield start, stop, *_arrays(wanted, stop - start)


def _arrays(wanted: Wanted, elements: int) -> tuple[dict[str, tuple[torch.dtype, int, int]], int]:
    """Return the arrays of a piece, and its bytes. Large weights and gradients have blocks of their
    own."""
    arrays: dict[str, tuple[torch.dtype, int, int]] = {}
    offset, before = 0, ""
    for name, (dtype, _) in wanted.items():
        entries = -(-elements // _elements_of_one(name))
        size_bytes = entries * dtype.itemsize
        if before == WEIGHTS:
            offset = apart(offset, offset)
        if name == GRADIENT:
            offset = apart(offset, size_bytes)
        arrays[name] = dtype, entries, offset
        offset, before = offset + aligned(size_bytes), name
    return arrays, offset
