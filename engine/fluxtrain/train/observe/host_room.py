"""Watches the host's memory while a run trains: caches and then optimizer states leave it, and the
run ends in order before it is killed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from fluxtrain.core.device.heap import give_back_spare, trim_heap
from fluxtrain.machine.machine import memory_left
from fluxtrain.units import MIB, bytes_text

LITTLE_SHARE = 0.02  # of all memory: with less left, or twice the least, it is freed
LEAST_SHARE = 0.005  # with less left, the run ends
LEAST_BYTES = (64 * MIB, 256 * MIB)  # the bounds of that
LOOKS = 3  # in a row, so that a peak of another program ends nothing
PERIOD_S = 1.0

Left = Callable[[], tuple[int, int] | None]


class HostRoom:
    """Looks now and then how much memory is left, by the control group or the machine.

    Where little is left, unneeded memory is freed; where that is not enough, `moves` is asked to
    free so many bytes, and says whether it will; if not, `ends` gets the reason, once.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        ends: Callable[[str], None],
        moves: Callable[[int], bool],
        *,
        read: Left = memory_left,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warn, self._ends, self._moves = warn, ends, moves
        self._read, self._clock = read, clock
        self._looked_s: float | None = None
        self._short = 0  # looks in a row with less than the least
        self._gave_up = self._ended = False

    def look(self) -> None:
        """Compare the free memory with the limits, at most once a second."""
        now_s = self._clock()
        if self._ended or (self._looked_s is not None and now_s - self._looked_s < PERIOD_S):
            return
        self._looked_s = now_s
        found = self._read()
        if found is None:
            return
        total, left = found
        little = int(max(LITTLE_SHARE * total, 2 * least_bytes(total)))
        if left >= little:
            self._short, self._gave_up = 0, False
            return
        if not self._gave_up:
            self._gave_up = True
            give_up_caches()
            found = self._read() or found
            self._warn(
                f"little host memory is left: {bytes_text(left)} of {bytes_text(total)}, and "
                f"{bytes_text(found[1])} once caches were given up; close other programs"
            )
            left = found[1]
        if left < little and self._moves(2 * little - left):
            self._short = 0
            return
        self._short = self._short + 1 if left < least_bytes(total) else 0
        if self._short >= LOOKS:
            self._ended = True
            self._ends(
                f"host memory ran out: {bytes_text(left)} of {bytes_text(total)} were left; close "
                "other programs, raise the container's limit, or set train.states=8bit or fewer "
                "train.batch_rows"
            )


def least_bytes(total: int) -> int:
    """Return the memory that must stay free: for programs' and the kernel's own pages."""
    low, high = LEAST_BYTES
    return min(max(int(LEAST_SHARE * total), low), high, total // 10)


def give_up_caches() -> None:
    """Free memory that the C library and torch cache, and memory for copies."""
    give_back_spare()
    trim_heap()
    torch = sys.modules.get("torch")
    empty = getattr(getattr(torch, "_C", None), "_host_emptyCache", None)
    if empty is not None and torch is not None and torch.cuda.is_initialized():
        empty()  # page-locked memory that no copy uses
