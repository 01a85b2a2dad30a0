"""A key of the frozen weights that adapters were trained beside.

A checkpoint of adapters holds no frozen weights, so it must not go on beside others. Reading all of
141 GB would take a minute: the key is of the files' sizes, their headers (names, shapes, dtypes)
and samples of their bytes. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLES = 64  # of each file, spread over all of it
SAMPLE_BYTES = 1 << 16


def base_key(files: Iterable[Path]) -> str:
    """Return a key (16 hexadecimal digits) of weight files, whatever their names and folder.

    Raises OSError when a file cannot be read.
    """
    digests = sorted(_digest(path) for path in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(str(size).encode())
    step = max(SAMPLE_BYTES, size // SAMPLES)
    with path.open("rb") as file:
        for start in (*range(0, size, step), max(0, size - SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
