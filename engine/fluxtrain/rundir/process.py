"""Identifies a process by its pid and start time, because pids are reused."""

from __future__ import annotations

import os
from functools import cache

import msgspec

START_TOLERANCE_S = 2.0  # a boot time derived from a clock that was set moves by about a second


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies one process on one host, also after its pid is reused."""

    pid: int
    start_s: float  # Unix time
    host: str

    @classmethod
    def mine(cls) -> ProcessMark:
        """Return the mark of the calling process."""
        return cls(pid=os.getpid(), start_s=process_start_s() or 0.0, host=os.uname().nodename)

    @property
    def is_local(self) -> bool:
        """Return whether the process is on this host, so that its pid means something."""
        return self.host == os.uname().nodename

    def is_alive(self) -> bool:
        """Return whether exactly this process still runs; a zombie does not."""
        start_s = process_start_s(self.pid)
        return start_s is not None and abs(start_s - self.start_s) <= START_TOLERANCE_S


def process_start_s(pid: int | None = None) -> float | None:
    """Return the Unix time at which a process started (default: this one); None if it ended.

    Source: proc(5), fields 3 (state) and 22 (start time in ticks since boot) of /proc/PID/stat.
    """
    pid = os.getpid() if pid is None else pid
    if not os.path.exists("/proc/self/stat"):
        return _start_without_proc_s(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold spaces and ")"
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return _boot_s() + int(fields[19]) / os.sysconf("SC_CLK_TCK")


@cache
def _boot_s() -> float:
    with open("/proc/stat", "rb") as file:
        for line in file:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    return 0.0


def _start_without_proc_s(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None
