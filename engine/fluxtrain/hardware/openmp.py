"""How long threads of OpenMP wait for each other on a processor before they sleep. No torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

# libgomp's own count is 300,000: beside other programs a thread then waits for one that the
# system has put aside, and burns the time which that one needs (docs/benchmarks.md).
SPINS = 2000
SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
GPU_NODES = ("dev/nvidiactl", "dev/dxg")  # the driver's, and that of WSL2


def share_cores(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Let threads that wait for each other soon sleep where the processor computes everything.

    Before torch is imported, for libgomp reads it once. Nothing where the user has set it, or with
    a GPU, whose host has AdamW alone to do.
    """
    found = os.environ if environment is None else environment
    set_by_user = any(name in found for name in SET_BY_USERS)
    if not set_by_user and not any((root / node).exists() for node in GPU_NODES):
        found["GOMP_SPINCOUNT"] = str(SPINS)
