"""Writes a model's weights as safetensors shards, one tensor in memory at a time.

The library's own writer takes all tensors of a file at once. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.train.checkpoint.shard_file import DTYPE_NAMES

_PIECE_BYTES = 16 << 20


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


def planned_shards(tensors: Iterable[PlannedTensor], most_bytes: int) -> list[list[PlannedTensor]]:
    """Cut the tensors, in their order, into shards of at most `most_bytes`; a larger tensor has a
    shard of its own."""
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
        _write(folder / "model.safetensors", shards[0], make)
        return
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / name, tensors, make)
        places |= {tensor.name: name for tensor in tensors}
    total = sum(tensor.size_bytes for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write(
    path: Path, tensors: list[PlannedTensor], make: Callable[[PlannedTensor], Tensor]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)  # stable: the format aligns data so
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size_bytes],
        }
        offset += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            made = make(tensor).detach()
            assert made.dtype == tensor.dtype and tuple(made.shape) == tensor.shape, tensor.name
            raw = made.contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(raw), _PIECE_BYTES):
                file.write(raw[start : start + _PIECE_BYTES].data)
            del made, raw
