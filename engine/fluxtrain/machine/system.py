"""Reads the operating system's set-up: page size, page locks, power, nodes, WSL2. No torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_SOME_TOTAL = re.compile(r"^some .*total=(\d+)", re.MULTILINE)
# These drivers set the frequency by themselves and call their normal governor "powersave".
_SELF_GOVERNING = frozenset({"intel_pstate", "amd-pstate-epp"})


@dataclass(frozen=True, kw_only=True)
class System:
    """Facts; `unknown` has the reason of every None except `memlock_limit_bytes`."""

    memlock_limit_bytes: int | None  # None: no limit
    huge_pages: str | None  # always, madvise (we ask for them) or never
    numa_nodes: int | None
    wsl: bool | None
    power_mode: str | None
    power_saving: tuple[str, ...]  # what slows this machine down to save power
    unknown: dict[str, str] = field(default_factory=dict)


def read_system(root: Path = Path("/")) -> System:
    """Read the facts; `root` is another file tree in tests (the page-lock limit is always ours)."""
    unknown: dict[str, str] = {}
    huge = _word(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", huge or "")
    if chosen is None:
        unknown["huge_pages"] = "the kernel has no transparent huge pages"
    release = _word(root / "proc/sys/kernel/osrelease")
    if release is None:
        unknown["wsl"] = "/proc/sys/kernel/osrelease cannot be read"
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if not nodes:
        unknown["numa_nodes"] = "/sys/devices/system/node lists none"
    mode, saving = _power(root)
    if mode is None:
        unknown["power_mode"] = "the kernel does not control the frequency (usual in virtual ones)"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return System(
        memlock_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        huge_pages=None if chosen is None else chosen[1],
        numa_nodes=nodes or None,
        wsl=None if release is None else "microsoft" in release.lower(),
        power_mode=mode,
        power_saving=saving,
        unknown=unknown,
    )


def wished_threads(environment: Mapping[str, str] | None = None) -> int | None:
    """Return OMP_NUM_THREADS, which torch and the native optimizer obey; None if it is not set."""
    first = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "")
    first = first.partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else None


def memory_waited_s(root: Path = Path("/")) -> float | None:
    """Return the seconds since boot in which a task of this machine (or container) waited.

    Reads the kernel's pressure stall information, Documentation/accounting/psi.rst: `some total=`
    counts microseconds in which at least one task waited to reclaim, refault or swap in. None if
    the kernel does not tell. Tests pass another file tree as `root`.
    """
    for name in ("sys/fs/cgroup/memory.pressure", "proc/pressure/memory"):
        try:
            found = _SOME_TOTAL.search((root / name).read_text())
        except OSError:
            continue
        if found is not None:
            return int(found[1]) / 1e6
    return None


def _power(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return (mode, reasons to be slow) of governor, preference, profile and battery."""
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver = _word(frequency / "scaling_governor"), _word(frequency / "scaling_driver")
    preference = _word(frequency / "energy_performance_preference")
    profile = _word(root / "sys/firmware/acpi/platform_profile")
    saving = []
    if governor == "powersave" and driver not in _SELF_GOVERNING:
        saving.append("the frequency governor is powersave")
    if preference in ("power", "balance_power"):
        saving.append(f"the energy preference is {preference}")
    if profile in ("low-power", "quiet"):
        saving.append(f"the platform profile is {profile}")
    if _on_battery(root):
        saving.append("the machine runs on battery")
    return ", ".join(filter(None, (governor, preference, profile))) or None, tuple(saving)


def _on_battery(root: Path) -> bool:
    """Return whether a mains supply is listed and unplugged; without a battery none is listed."""
    supplies = list((root / "sys/class/power_supply").glob("*"))
    mains = [_word(one / "online") for one in supplies if _word(one / "type") == "Mains"]
    return bool(mains) and all(online == "0" for online in mains)


def _word(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
