"""Writes a model's safetensors files at the speed of the disk.

Pieces of a file are written by several threads: one copies to the system no faster than a disk
writes, and the library's own `save_file` holds the GIL. The disk begins with each piece at once.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.files.at_once import several_at_once

SHARD_BYTES = 4_000_000_000
OF_TORCH = {"format": "pt"}  # which transformers asks for
_PIECE_BYTES = 16 << 20
DTYPE_NAMES = {  # of dtypes in a safetensors header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Count its bytes."""
        return prod(self.shape) * self.dtype.itemsize


def headed(
    tensors: Iterable[PlannedTensor], metadata: Mapping[str, str]
) -> tuple[list[PlannedTensor], bytes]:
    """Return the order of a file's tensors, wide dtypes first as the format wants aligned data, and
    the bytes in front of them."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # stable
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size_bytes],
        }
        offset += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return ordered, len(text).to_bytes(8, "little") + text


def planned_of(tensors: Mapping[str, Tensor]) -> list[PlannedTensor]:
    """Return tensors as they will be written, by their names."""
    return [PlannedTensor(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in sorted(tensors)]


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path | str, metadata: Mapping[str, str] = OF_TORCH
) -> None:
    """Write tensors as the library's `save_file` does, and wait until they are on the disk."""
    write_planned(Path(path), planned_of(tensors), lambda one: tensors[one.name], metadata)


def write_planned(
    path: Path,
    tensors: list[PlannedTensor],
    make: Callable[[PlannedTensor], Tensor],
    metadata: Mapping[str, str] = OF_TORCH,
) -> None:
    """Write a new file, and wait until it is on the disk. `make` returns a tensor, in any memory,
    when it is its turn."""
    ordered, header = headed(tensors, metadata)

    def pieces() -> Iterator[tuple[int, memoryview]]:
        yield 0, memoryview(header)
        at = len(header)
        for tensor in ordered:
            made = make(tensor).detach()
            assert made.dtype == tensor.dtype and tuple(made.shape) == tensor.shape, tensor.name
            raw = made.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            for start in range(0, len(raw), _PIECE_BYTES):
                yield at + start, raw[start : start + _PIECE_BYTES].data
            at += len(raw)
            del made, raw

    with path.open("xb") as file:

        def write(_: int, piece: tuple[int, memoryview]) -> None:
            at, data = piece
            while data:
                written = os.pwrite(file.fileno(), data, at)  # closed after a signal
                at, data = at + written, data[written:]
            start, length = piece[0], at - piece[0]
            os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)

        several_at_once(write, pieces())
        os.fsync(file.fileno())


def planned_shards(tensors: Iterable[PlannedTensor], most_bytes: int) -> list[list[PlannedTensor]]:
    """Cut the tensors, in their order, into shards of at most `most_bytes`; a larger tensor is one
    shard."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size_bytes
    return shards


def write_model(
    folder: Path, shards: list[list[PlannedTensor]], make: Callable[[PlannedTensor], Tensor]
) -> None:
    """Write the shards into `folder` under transformers' names, with an index where they are
    several. `make` returns a tensor when it is its turn."""
    if len(shards) == 1:
        write_planned(folder / "model.safetensors", shards[0], make)
        return
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_planned(folder / name, tensors, make)
        places |= {tensor.name: name for tensor in tensors}
    total = sum(tensor.size_bytes for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
