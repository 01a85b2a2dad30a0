"""How torch takes the memory of a GPU. No torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads both
SETTING = "expandable_segments:True"
GPU_NODE = "dev/nvidiactl"  # of the driver; WSL2 has another one, and nobody has tried it there


def let_segments_grow(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Let torch's allocator map pages where it needs them.

    It usually takes segments of fixed sizes. What lives as long as the run, optimizer states above
    all, then stands between what comes and goes, and of a card that is planned to be full the tenth
    that should be free is in pieces too small for a chunk (docs/benchmarks.md). Before torch is
    imported. Nothing where the user has set anything, or without a GPU.
    """
    found = os.environ if environment is None else environment
    if not any(name in found for name in NAMES) and (root / GPU_NODE).exists():
        found[NAMES[0]] = SETTING
