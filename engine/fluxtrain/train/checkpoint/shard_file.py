"""Writes safetensors files tensor by tensor: no second copy of a shard, and a hash for free.

Several files are written or read at once, as one thread that hashes is slower than a disk; hashing,
reading and writing do not hold the GIL. The library's own `save_file` holds it, and a hash would
read the file again. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from fluxtrain.core.memory.states_on_disk import OnDisk
from fluxtrain.files.opening import open_plain

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
}
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on disk: its size and the sha256 of its bytes."""

    bytes: int
    sha256: str


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


def headed(tensors: Iterable[PlannedTensor], **metadata: str) -> tuple[list[PlannedTensor], bytes]:
    """Return the order of a file's tensors, wide dtypes first as the format wants aligned data, and
    the bytes in front of them."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # stable
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
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

    def abandon(self) -> None:
        """Close without flushing to disk; a full disk may refuse even the last buffered bytes."""
        try:
            self._file.close()
        except OSError:
            return


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write `tensors` (contiguous or not, any device or on disk) as one safetensors file.

    Raises:
        OSError: the disk refused; the partial file is left for the caller to remove.
    """
    planned = [PlannedTensor(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in sorted(tensors)]
    ordered, header = headed(planned)
    out = HashingFile(path)
    try:
        out.write(header)
        for tensor in ordered:
            _write_tensor(out, tensors[tensor.name])
        return out.finish()
    except BaseException:
        out.abandon()
        raise


def write_json(path: Path, value: Any) -> WrittenFile:
    """Write `value` as one JSON file and wait until it is on disk."""
    out = HashingFile(path)
    try:
        out.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")
        return out.finish()
    except BaseException:
        out.abandon()
        raise


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


THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


def several_at_once(
    work: Callable[[int, T], R], items: Iterable[T], threads: int = THREADS
) -> list[R]:
    """Do `work` with the number of each item, from 0, and the item, on up to `threads` threads,
    this one among them; on fewer where the system refuses one. Returns the results in order.

    An item is taken from the iterable, by one thread at a time, once a thread is free for it. After
    an error no further item is taken; the error is raised once all threads have ended.
    """
    lock, numbers, left = threading.Lock(), count(), iter(items)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with lock:
                    number, item = next(numbers), next(left)
                results[number] = work(number, item)
                del item  # or its memory would stay while this thread waits for the next one
        except StopIteration:
            return
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    started: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # a limit of threads
            for number in range(1, threads):
                thread = threading.Thread(target=run, name=f"file-{number}")
                thread.start()
                started.append(thread)
        run()
        for thread in started:
            thread.join()
    except BaseException as error:  # a signal: the other threads take nothing more
        errors.append(error)
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
