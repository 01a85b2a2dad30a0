"""Identifies a process by its pid and start time, because pids are reused.

The start is counted in ticks since the machine booted, which nobody can set, and the boot has an id
of its own. Wall clocks are set while a run trains.
"""

from __future__ import annotations

import os
import time
from functools import cache

import msgspec


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies one process on one host, also after its pid is reused."""

    pid: int
    start_s: float  # Unix time, for people: it moves when the clock is set
    host: str
    start_ticks: int = -1  # since the boot
    boot: str = ""  # the id of the boot; "": not known here

    @classmethod
    def mine(cls) -> ProcessMark:
        """Return the mark of the calling process."""
        return _mark_of(os.getpid())

    @property
    def is_local(self) -> bool:
        """Return whether the process is on this host, so that its pid means something."""
        return self.boot == boot_id() if self.boot else self.host == os.uname().nodename

    @property
    def shares_clock(self) -> bool:
        """Return whether its monotonic clock is ours: it runs on this machine, since this boot."""
        return bool(self.boot) and self.boot == boot_id()

    def is_alive(self) -> bool:
        """Return whether exactly this process still runs here; a zombie does not."""
        return self.is_local and start_ticks(self.pid) == self.start_ticks


@cache
def _mark_of(pid: int) -> ProcessMark:
    ticks = start_ticks(pid) or 0
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return ProcessMark(
        pid=pid,
        start_s=time.time() - ago_s,
        host=os.uname().nodename,
        start_ticks=ticks,
        boot=boot_id(),
    )


@cache
def boot_id() -> str:
    """Return the id of this boot of this machine, the same in all its containers; "" if unknown.

    Source: random(4), /proc/sys/kernel/random/boot_id.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""


def start_ticks(pid: int) -> int | None:
    """Return the ticks since the boot at which a process started; None if it ended.

    Source: proc(5), fields 3 (state) and 22 (start time in ticks since boot) of /proc/PID/stat.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold spaces and ")"
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])
