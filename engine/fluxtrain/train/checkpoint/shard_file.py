"""Writes safetensors files tensor by tensor: no second copy of a shard, and a hash for free.

Several files are written or read at once, as one thread that hashes is slower than a disk; hashing,
reading and writing do not hold the GIL. The library's own `save_file` holds it, and a hash would
read the file again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor

from fluxtrain.core.memory.states_on_disk import OnDisk
from fluxtrain.files.opening import open_plain
from fluxtrain.models.tensor_files import headed, planned_of

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on disk: its size and the sha256 of its bytes."""

    bytes: int
    sha256: str


class HashingFile:
    """A new file that hashes what it writes; `finish` returns once its bytes are on disk."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._hash = hashlib.sha256()
        self._written_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._written_bytes += len(data)

    def finish(self) -> WrittenFile:
        """Flush to the disk itself. Raises OSError when there is no room."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return WrittenFile(self._written_bytes, self._hash.hexdigest())

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Close without flushing to disk; a full disk may refuse even the last buffered bytes."""
        with suppress(OSError):
            self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write `tensors` (contiguous or not, any device or on disk) as one safetensors file.

    Raises:
        OSError: the disk refused; the partial file is left for the caller to remove.
    """
    ordered, header = headed(planned_of(tensors), {})
    with HashingFile(path) as out:
        out.write(header)
        for tensor in ordered:
            _write_tensor(out, tensors[tensor.name])
        return out.finish()


def write_json(path: Path, value: Any) -> WrittenFile:
    """Write `value` as one JSON file and wait until it is on disk."""
    with HashingFile(path) as out:
        out.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")
        return out.finish()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped from it."""
    return load_file(path)


def hash_file(path: Path) -> WrittenFile:
    """Return size and sha256 of the file that is on disk now."""
    digest = hashlib.sha256()
    size = 0
    with open_plain(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return WrittenFile(size, digest.hexdigest())


def _write_tensor(out: HashingFile, tensor: Tensor) -> None:
    if isinstance(tensor, OnDisk):
        for piece in tensor.pieces():
            _write_tensor(out, piece)
        return
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # bytes as they are
    step = _PIECE_BYTES
    for start in range(0, raw.numel(), step):
        out.write(raw[start : start + step].cpu().numpy().data)
