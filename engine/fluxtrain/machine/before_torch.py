"""Settings that torch and OpenMP read once, when torch is imported. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads both
SETTING = "expandable_segments:True"
PAGE_BYTES = 20 << 20  # by which a segment of large blocks grows (torch's kLargeBuffer)
GPU_NODE = "dev/nvidiactl"  # the driver's; WSL2 has another one, which is untested


def let_segments_grow(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Let torch's allocator map pages where it needs them; call it before torch is imported.

    It usually takes segments of fixed sizes. Tensors that live as long as the run, optimizer states
    above all, then fragment the memory: on a card that is planned to be full, the tenth that should
    be free is in pieces too small for a chunk (docs/benchmarks.md). Does nothing if the user has
    set an option of the allocator, or without a GPU.
    """
    found = os.environ if environment is None else environment
    if not any(name in found for name in NAMES) and (root / GPU_NODE).exists():
        found[NAMES[0]] = SETTING


def segments_grow(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torch's allocator was told to take memory page by page."""
    found = os.environ if environment is None else environment
    return any(SETTING in found.get(name, "").replace(" ", "") for name in NAMES)


def limit_within(bytes_left: int, *, grow: bool) -> int:
    """Return the limit to set so that torch's allocator takes no more than `bytes_left`.

    Before torch takes a block, a multiple of 2 MiB, it compares its limit with the block's size; a
    segment that grows (`grow`) then takes whole pages for the block. So it can exceed its limit by
    less than a page, even a limit of whole pages, because small blocks have smaller pages.
    """
    return max(0, bytes_left - PAGE_BYTES) if grow else bytes_left


# libgomp's own count is 300,000: beside other programs a thread then spins for one that the system
# has preempted, and burns the processor time that one needs (docs/benchmarks.md).
SPINS = 2000
SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
GPU_NODES = ("dev/nvidiactl", "dev/dxg")  # the driver's, and that of WSL2


def share_cores(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Let waiting threads sleep soon if the processor computes everything.

    Call it before torch is imported, because libgomp reads the setting once. Does nothing if the
    user has set it, or with a GPU, when the host computes AdamW alone.
    """
    found = os.environ if environment is None else environment
    set_by_user = any(name in found for name in SET_BY_USERS)
    if not set_by_user and not any((root / node).exists() for node in GPU_NODES):
        found["GOMP_SPINCOUNT"] = str(SPINS)
