"""Reads how long programs waited for host memory: the kernel's pressure stall information.

Source: Documentation/accounting/psi.rst. `some total=` counts microseconds in which at least one
task waited for memory: reclaim, refaults, swapping in.
"""

from __future__ import annotations

import re
from pathlib import Path

_SOME_TOTAL = re.compile(r"^some .*total=(\d+)", re.MULTILINE)


def memory_waited_s(root: Path = Path("/")) -> float | None:
    """Return the seconds since boot in which a task of this machine (or container) waited.

    None if the kernel does not tell. Tests pass another file tree as `root`.
    """
    for name in ("sys/fs/cgroup/memory.pressure", "proc/pressure/memory"):
        try:
            found = _SOME_TOTAL.search((root / name).read_text())
        except OSError:
            continue
        if found is not None:
            return int(found[1]) / 1e6
    return None
