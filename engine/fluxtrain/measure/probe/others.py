"""Measures how much of the processors other programs used during a measurement.

Source: proc_stat(5). In a container the counts are those of the whole machine, whose programs share
the processors.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.15  # of all processors; a measurement under more is soon repeated
LOOK_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE, _WAITING = 3, 4  # columns of the line "cpu"
_TOLD = 8  # guests, in the columns after these, are counted in the first ones


@dataclass(frozen=True, kw_only=True)
class ProcessorUse:
    """Seconds that processors were busy up to some time, by all programs and by this process."""

    busy_s: float
    own_s: float
    at_s: float

    def others_share(self, later: ProcessorUse) -> float | None:
        """Return the share of all processors that other programs used in between; None if no time
        passed."""
        window_s = (later.at_s - self.at_s) * (os.cpu_count() or 1)
        if window_s <= 0:
            return None
        others_s = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return min(1.0, max(0.0, others_s / window_s))


def read_use(root: Path = Path("/")) -> ProcessorUse | None:
    """Read the present use; None if the kernel does not tell. Tests pass another file tree."""
    try:
        name, *columns = (root / "proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(column) for column in columns[:_TOLD]]
    except (OSError, ValueError):
        return None
    if name != "cpu" or len(ticks) <= _WAITING:
        return None
    busy = sum(ticks) - ticks[_IDLE] - ticks[_WAITING]
    own = os.times()  # the machine's counts include children that ended
    own_s = own.user + own.system + own.children_user + own.children_system
    return ProcessorUse(busy_s=busy / _TICKS_PER_S, own_s=own_s, at_s=time.monotonic())


def others_share(since: ProcessorUse | None) -> float | None:
    """Return the share of all processors that other programs used since; None: not known."""
    now = read_use()
    return None if since is None or now is None else since.others_share(now)


def is_calm_after(share: float | None) -> bool:
    """Return whether others' `share` disturbed a measurement and the processors are free now.

    Looks for a quarter of a second, and only if the measurement was disturbed.
    """
    if share is None or share < BUSY_SHARE:
        return False
    before = read_use()
    time.sleep(LOOK_S)
    now = others_share(before)
    return now is not None and now < BUSY_SHARE / 2


def beside_text(share: float | None, *, command: str) -> str:
    """Say how much others disturbed a measurement, for people; empty if they did not.

    command: the command that measures again once the processors are free.
    """
    if share is None or share < BUSY_SHARE:
        return ""
    return (
        f"; other programs used {share:.0%} of the processors meanwhile, so this machine looks "
        f"slower than it is: the next `{command}` measures again when they are done"
    )
