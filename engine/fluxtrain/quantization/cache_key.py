"""Names a packed model by what its bytes depend on: the files, the weights taken, the format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fluxtrain.plan.states import PackedFormat

RECIPE = 1  # raise it when packing would write other bytes
_LENGTH_BYTES = 8  # of the header of a safetensors file, at its beginning
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit

Parameter = tuple[str, tuple[int, ...], torch.dtype]


def cache_key(
    format: PackedFormat,
    shards: Sequence[Path],
    parameters: Sequence[Parameter],
    more: Sequence[str] = (),
) -> str:
    """Return 32 hexadecimal digits for weights packed in `format`.

    shards: the model's files. parameters: name, shape and dtype, as loaded, of each packed weight,
    in order. more: what else changes weights before they are packed. Raises OSError for a shard
    that cannot be read.
    """
    facts = [
        RECIPE,
        format,
        sorted(_identity(shard) for shard in shards),
        [[name, list(shape), str(dtype)] for name, shape, dtype in parameters],
        list(more),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _identity(shard: Path) -> list[object]:
    """Return what tells this file from any other: its name in the hub's cache, which is a hash of
    its bytes; else its name, size, time of change and the hash of its header."""
    real = shard.resolve()
    if real.parent.name == "blobs":
        return ["blob", real.name]
    facts = real.stat()
    return ["file", shard.name, facts.st_size, facts.st_mtime_ns, _header_hash(real)]


def _header_hash(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = min(int.from_bytes(start, "little"), _MOST_HEADER_BYTES)
        if path.suffix != ".safetensors":
            length = 0
        return hashlib.sha256(start + file.read(length)).hexdigest()
