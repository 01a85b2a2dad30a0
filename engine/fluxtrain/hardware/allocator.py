"""How torch takes the memory of a GPU. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads both
SETTING = "expandable_segments:True"
PAGE_BYTES = 20 << 20  # by which a segment of large blocks grows (torch's kLargeBuffer)
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


def segments_grow(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torch's allocator was told to take memory page by page."""
    found = os.environ if environment is None else environment
    return any(SETTING in found.get(name, "").replace(" ", "") for name in NAMES)


def limit_within(bytes_left: int, *, grow: bool) -> int:
    """The limit to set so that torch's allocator takes no more than `bytes_left`.

    It compares its limit with the size of a block, a multiple of 2 MiB, before it takes one, and a
    segment that grows (`grow`) then takes whole pages for that block. So it can pass its limit, by
    less than a page whatever the limit is a multiple of, because small blocks have smaller pages.
    """
    return max(0, bytes_left - PAGE_BYTES) if grow else bytes_left
