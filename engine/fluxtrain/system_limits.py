"""Looks at the system's limits of threads and address space before libraries run into them: these
end the process from native code, without words or with exit codes of their own.

Call it before torch and numpy are imported, whose threads are counted by variables that are read
once. Imports nothing slow.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence

from fluxtrain.errors import DoesNotFit
from fluxtrain.units import bytes_text

COMPUTING = (
    "train", "plan", "inspect", "dry-run", "export", "evaluate", "generate", "probe", "doctor",
)  # fmt: skip
OWN_THREADS = 12  # control, gauges, timeline, copies, updates and the like, with some to spare
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")  # each has threads
LEAST_ADDRESS_BYTES = 2 << 30  # what the libraries of a run map, and a little model


def fit_into_limits(
    arguments: Sequence[str],
    say: Callable[[str], None],
    environment: MutableMapping[str, str] | None = None,
) -> None:
    """Let the libraries make no more threads than the system allows, where a command of `arguments`
    computes.

    Raises DoesNotFit where it allows too few for any run, or too little address space.
    """
    if not arguments or arguments[0] not in COMPUTING or "torch" in sys.modules:
        return  # a program with torch calls this, whose threads are there already
    found = os.environ if environment is None else environment
    _refuse_little_space()
    cores = len(os.sched_getaffinity(0))
    sizes = {name: _size(found.get(name), cores) for name in POOLS}
    needed = OWN_THREADS + sum(sizes.values())
    allowed = startable(needed)
    if allowed >= needed:
        return
    room = (allowed - OWN_THREADS) // len(POOLS)
    if room < 1:
        raise DoesNotFit(
            f"the system allows {allowed} more threads here, and a run needs "
            f"{OWN_THREADS + len(POOLS)}: raise its limit of processes and threads (`ulimit -u`, a "
            "container's pids limit), or close other programs"
        )
    for name in POOLS:
        found[name] = str(min(room, sizes[name]))
    say(
        f"warning: the system allows {allowed} more threads here, and {needed} would be used: "
        f"libraries compute with {room} each; raise `ulimit -u` or the container's pids limit"
    )


def startable(wanted: int) -> int:
    """Return how many threads can be started now, at most `wanted`; all of them end again."""
    release, started = threading.Event(), []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):  # can't start new thread
        pass
    finally:
        release.set()
        for thread in started:
            thread.join()
    return len(started)


def _size(told: str | None, cores: int) -> int:
    return int(told) if told and told.isascii() and told.isdecimal() and int(told[:6]) else cores


def _refuse_little_space() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_BYTES:
        raise DoesNotFit(
            f"the address space of this process is limited to {bytes_text(limit)}, and a run needs "
            f"{bytes_text(LEAST_ADDRESS_BYTES)} for its libraries alone: raise `ulimit -v`"
        )
