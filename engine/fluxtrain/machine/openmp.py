"""Sets how long OpenMP threads spin for each other before they sleep. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

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
