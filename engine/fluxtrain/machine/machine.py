"""Describes this machine: cores, instruction set, host memory and GPUs that this process may use.

Every fact is measured, or None with the reason in `unknown`. No torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from fluxtrain._native import ISA_VARIABLE, refuse_unknown_isa
from fluxtrain.events.answers.machine import Machine
from fluxtrain.machine.cgroup import cgroup_limits
from fluxtrain.machine.gpu import Gpus, read_gpus
from fluxtrain.machine.system import read_system, wished_threads

# CPU features that the native update needs; source: the compiler flags of its variants.
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("avx2", frozenset({"avx2", "fma"})),
    ("scalar", frozenset()),
)


def available_bytes() -> int | None:
    """Return the host memory that this process may take now; None where that is unknown."""
    no_gpus = Gpus(gpus=(), driver=None, reason="not asked")
    return read_machine(gpus=no_gpus).memory_available_bytes


def read_machine(root: Path = Path("/"), gpus: Gpus | None = None) -> Machine:
    """Read the machine's facts. Tests pass another file tree as `root` and other `gpus`."""
    unknown: dict[str, str] = {}
    gpus = read_gpus() if gpus is None else gpus
    if gpus.reason is not None:
        unknown["gpus"] = gpus.reason
    if gpus.driver is None:
        unknown["driver"] = gpus.reason or "the driver does not say"
    limits = cgroup_limits(root)
    total, available = _memory(root, unknown)
    name, flags = _cpu(root)
    if name is None:
        unknown["cpu_name"] = "/proc/cpuinfo has no model name"
    affinity, installed = len(os.sched_getaffinity(0)), os.cpu_count()
    if installed is None:
        unknown["cores_installed"] = "the kernel does not say"
    system = read_system(root)
    unknown |= system.unknown
    quota = limits.cpu_quota
    return Machine(
        cores=affinity if quota is None else max(1, min(affinity, math.floor(quota))),
        cpu_quota=quota,
        cpu_name=name,
        instruction_set=_instruction_set(flags),
        memory_total_bytes=_smaller(total, limits.memory_bytes),
        memory_available_bytes=_smaller(available, limits.memory_left_bytes),
        memory_limit_bytes=limits.memory_bytes,
        gpus=gpus.visible(),
        driver=gpus.driver,
        cores_installed=installed,
        threads_wished=wished_threads(),
        memory_installed_bytes=total,
        memlock_limit_bytes=system.memlock_limit_bytes,
        huge_pages=system.huge_pages,
        numa_nodes=system.numa_nodes,
        wsl=system.wsl,
        power_mode=system.power_mode,
        power_saving=system.power_saving,
        unknown=unknown,
    )


def memory_left(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the bytes of host memory that a process may have here, and the bytes left, by the
    control group or the machine; None where the kernel does not say."""
    limits = cgroup_limits(root)
    total, available = _memory(root, {})
    total = _smaller(total, limits.memory_bytes)
    available = _smaller(available, limits.memory_left_bytes)
    return None if total is None or available is None else (total, available)


def _memory(root: Path, unknown: dict[str, str]) -> tuple[int | None, int | None]:
    """Read MemTotal and MemAvailable of /proc/meminfo, in bytes."""
    facts: dict[str, int] = {}
    why = ""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                facts[key] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError) as error:
        why = str(error)
    for key, names in (
        ("MemTotal", ("memory_total_bytes", "memory_installed_bytes")),
        ("MemAvailable", ("memory_available_bytes",)),
    ):
        if key not in facts:
            unknown |= dict.fromkeys(names, why or f"/proc/meminfo has no {key}")
    return facts.get("MemTotal"), facts.get("MemAvailable")


def _cpu(root: Path) -> tuple[str | None, frozenset[str]]:
    """Read model name and feature flags of the first CPU."""
    facts: dict[str, str] = {}
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        return None, frozenset()
    return facts.get("model name"), frozenset(facts.get("flags", "").split())


def _instruction_set(flags: frozenset[str]) -> str:
    """Return the best set that the processor has complete; FLUXTRAIN_ISA may lower it.

    Raises BadInput for an unknown set.
    """
    has = [name for name, needed in _LEVELS if flags >= needed]
    wish = os.environ.get(ISA_VARIABLE)
    refuse_unknown_isa(wish)
    return next((name for name in has if name == wish), has[0])


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)
