"""Reads a container's memory limit and CPU quota from control groups, versions 1 and 2.

A program that sizes itself from MemTotal or the CPU count is wrong in containers. Limits of all
enclosing groups apply, so the smallest counts. Source: the kernel's cgroup-v1 and cgroup-v2 guides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class CgroupLimits:
    """None is no limit (or no control groups)."""

    memory_bytes: int | None
    memory_left_bytes: int | None  # below the tightest limit; droppable caches count as free
    cpu_quota: float | None  # cores


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Read the limits of this process; `root` is another file tree in tests."""
    limits, left, quotas = [], [], []
    for folder in _folders(root, "memory"):
        limit = _memory_limit(folder)
        if limit is not None:
            limits.append(limit)
            left.append(max(0, limit - _working_set_bytes(folder)))
    for folder in _folders(root, "cpu"):
        quota = _quota(folder)
        if quota is not None:
            quotas.append(quota)
    return CgroupLimits(
        min(limits, default=None), min(left, default=None), min(quotas, default=None)
    )


def quota_cores(root: Path = Path("/")) -> int | None:
    """Return the whole cores that the CPU quota keeps busy, at least one; None without a quota."""
    quota = cgroup_limits(root).cpu_quota
    return None if quota is None else max(1, math.floor(quota))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Return this process's group for a controller and its enclosing groups, innermost first.

    In a container the path may be as the host sees it and not exist here; then the container's own
    root is the group.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for part in (inside, *inside.parents):
            if ".." not in part.parts and (base / part).is_dir():
                yield base / part


def _memory_limit(folder: Path) -> int | None:
    """Return the smallest of a group's own limits; above `memory.high` the kernel slows the group
    down almost to a halt."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for name in names if (limit := _number(folder / name)) is not None]
    limit = min(limits, default=UNLIMITED_BYTES)
    return limit if limit < UNLIMITED_BYTES else None


def _working_set_bytes(folder: Path) -> int:
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    try:
        stat = (folder / "memory.stat").read_text().split()
    except OSError:
        return used
    facts = dict(zip(stat[::2], stat[1::2], strict=False))
    droppable = facts.get("total_inactive_file") or facts.get("inactive_file") or "0"
    return max(0, used - int(droppable))


def _quota(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    quota, span = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / span if quota is not None and quota > 0 and span else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
