"""A process in a real control group of its own sees that group's limits (where one can be made)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.units import MIB

MOUNT = Path("/sys/fs/cgroup")
LIMIT_BYTES = 512 * MIB
QUOTA_CORES = 1.5
PROGRAM = """
import json, sys
for tasks in sys.argv[1:]:
    open(tasks, "w").write("0")  # this process
from fluxtrain.machine.machine import read_machine
machine = read_machine()
print(json.dumps([machine.memory_limit_bytes, machine.memory_total_bytes,
                  machine.memory_available_bytes, machine.cpu_quota, machine.cores]))
"""


def facts_of_a_process_in(groups: list[Path]) -> list[float]:
    places = [str(group / "cgroup.procs") for group in groups]
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *places], capture_output=True, text=True, check=False
    )
    if "No space left" in finished.stderr or "Permission" in finished.stderr:
        pytest.skip("this process may not move into a group")
    assert finished.returncode == 0, finished.stderr
    found: list[float] = json.loads(finished.stdout)
    return found


def memory_limit() -> dict[str, dict[str, str]]:
    is_v2 = (MOUNT / "cgroup.controllers").exists()
    return {"memory": {"memory.max" if is_v2 else "memory.limit_in_bytes": str(LIMIT_BYTES)}}


def test_a_process_with_limited_memory_is_shown_its_limit(
    limited: Callable[..., list[Path]],
) -> None:
    limit, total, available, *_ = facts_of_a_process_in(limited(memory_limit()))
    assert limit == total == LIMIT_BYTES
    assert LIMIT_BYTES / 2 < available < LIMIT_BYTES, "its own pages are taken off"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a quota below all cores needs two")
def test_a_process_with_a_quota_is_shown_whole_cores(limited: Callable[..., list[Path]]) -> None:
    if (MOUNT / "cgroup.controllers").exists():
        values = {"cpu.max": f"{int(QUOTA_CORES * 100_000)} 100000"}
    else:
        period = {"cpu.cfs_period_us": "100000"}
        values = period | {"cpu.cfs_quota_us": str(int(QUOTA_CORES * 100_000))}
    *_, quota, cores = facts_of_a_process_in(limited({"cpu": values}))
    assert (quota, cores) == (QUOTA_CORES, 1)
