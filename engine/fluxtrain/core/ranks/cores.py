"""The processor cores of one rank among those of its machine.

torchrun starts several processes with one OpenMP thread each, which would leave AdamW on the host a
fraction of the memory's rate. Variables that a user may set, with N the number of a NUMA node:
`CPU_LIST_NODE{N}` (its cores, such as 0-31,64-95), `CONTROLLER_CORES_PER_RANK` (of a rank's cores
so many are left to the threads that queue work), `THREADS_PER_RANK` (that update, instead).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fluxtrain.errors import BadInput

_NODES = Path("/sys/devices/system/node")


def cores_of(
    local_rank: int, local_world: int, nodes: Sequence[Sequence[int]], allowed: set[int]
) -> list[int]:
    """Return the cores of one of a machine's ranks: neighbours share a node, and each has as many
    as the others there. Without enough for each, all ranks share all."""
    usable = [[core for core in node if core in allowed] for node in nodes]
    usable = [node for node in usable if node] or [sorted(allowed)]
    homes = [rank * len(usable) // local_world for rank in range(local_world)]
    node = usable[homes[local_rank]]
    mates = [rank for rank, home in enumerate(homes) if home == homes[local_rank]]
    each = len(node) // len(mates)
    first = mates.index(local_rank) * each
    return node[first : first + each] if each else sorted(allowed)


def threads_of(cores: int, environment: Mapping[str, str]) -> int:
    """Return how many of a rank's cores compute and update. Raises BadInput for odd variables."""
    left = _number(environment, "CONTROLLER_CORES_PER_RANK", 0)
    return max(1, _number(environment, "THREADS_PER_RANK", max(1, cores - left)))


def numa_nodes(environment: Mapping[str, str], root: Path = _NODES) -> list[list[int]]:
    """Return the cores of each NUMA node, as the system or the user says."""
    found: list[list[int]] = []
    for number in range(len(list(root.glob("node[0-9]*"))) or 1):
        file, name = root / f"node{number}" / "cpulist", f"CPU_LIST_NODE{number}"
        text = environment.get(name) or (file.read_text() if file.exists() else "")
        try:
            found.append(_listed(text))
        except ValueError:
            raise BadInput(f"{name} is {text!r}: use a list such as 0-31,64-95") from None
    return found


def share_of_rank(environment: Mapping[str, str]) -> int:
    """Return a rank's even share of the cores that it may use, by torchrun's variables; 0 where it
    is alone."""
    told = environment.get("LOCAL_WORLD_SIZE", "")
    count = int(told) if told.isdecimal() else 1
    return len(os.sched_getaffinity(0)) // count if count > 1 else 0


def bind(local_rank: int, local_world: int) -> int:
    """Keep this rank to its cores, and return how many threads compute there; 0 where it has the
    machine for itself, and keeps torch's."""
    if local_world == 1 or not hasattr(os, "sched_setaffinity"):
        return 0
    nodes, allowed = numa_nodes(os.environ), os.sched_getaffinity(0)
    cores = cores_of(local_rank, local_world, nodes, allowed)
    threads = threads_of(len(cores), os.environ)
    os.sched_setaffinity(0, cores)
    return threads


def _listed(text: str) -> list[int]:
    cores: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1) if part else []
    return cores


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return otherwise
    if not text.isdecimal():
        raise BadInput(f"{name} is {text!r}: use a whole number of cores")
    return int(text)
