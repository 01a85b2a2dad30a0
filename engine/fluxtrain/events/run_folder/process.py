"""Identifies a process by its pid and start time, because pids are reused.

The start is counted in ticks since the machine booted, which nobody can set, and the boot has an id
of its own. Wall clocks are set while a run trains, and the boot time that is told moves with them.
"""

from __future__ import annotations

import os
from functools import cache

import msgspec

START_TOLERANCE_S = 2.0  # of marks without ticks, whose boot time was derived from the wall clock


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
        return cls(
            pid=os.getpid(),
            start_s=process_start_s() or 0.0,
            host=os.uname().nodename,
            start_ticks=_start_ticks(os.getpid()) or -1,
            boot=boot_id(),
        )

    @property
    def is_local(self) -> bool:
        """Return whether the process is on this host, so that its pid means something."""
        return self.boot == boot_id() if self.boot else self.host == os.uname().nodename

    @property
    def shares_clock(self) -> bool:
        """Return whether its monotonic clock is ours: it runs on this machine, since this boot."""
        return bool(self.boot) and self.boot == boot_id()

    def is_alive(self) -> bool:
        """Return whether exactly this process still runs; a zombie does not."""
        if self.boot and self.start_ticks >= 0:
            return self.boot == boot_id() and _start_ticks(self.pid) == self.start_ticks
        start_s = process_start_s(self.pid)
        return start_s is not None and abs(start_s - self.start_s) <= START_TOLERANCE_S


def process_start_s(pid: int | None = None) -> float | None:
    """Return the Unix time at which a process started (default: this one); None if it ended."""
    pid = os.getpid() if pid is None else pid
    if not os.path.exists("/proc/self/stat"):
        return _start_without_proc_s(pid)
    ticks = _start_ticks(pid)
    return None if ticks is None else _boot_s() + ticks / os.sysconf("SC_CLK_TCK")


@cache
def boot_id() -> str:
    """Return what names this boot of this machine, the same in all its containers; "" if unknown.

    Source: random(4), /proc/sys/kernel/random/boot_id.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""


def _start_ticks(pid: int) -> int | None:
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
