"""Wait for room on a full disk, so that a long run does not end for what somebody soon tidies; tell
of a disk that falls behind the rates by which the run was planned."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from fluxtrain.core.device.spill import Spill
from fluxtrain.errors import NoSpace, ScratchLost
from fluxtrain.events.emitter import Announcer
from fluxtrain.units import duration_text, rate_text

T = TypeVar("T")
DISK_WAIT_MIN = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
_SLICE_S = 0.2  # a stop is heard so soon
_LOOK_S, _SLOWER = 10.0, 1.3  # of the disk's work between two looks; what is worth telling


class DiskWait:
    """Repeats a refused write until the disk has room, a stop is asked for, or time is over.

    The run's thread waits, and says so as its phase; other threads continue. A process's limit on
    the size of files is not waited for, as nobody can lift it, nor what lost optimizer states.
    """

    def __init__(
        self,
        limit_s: float,
        announcer: Announcer,
        stopping: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit_s = limit_s
        self._announcer = announcer
        self._stopping = stopping
        self._clock, self._sleep = clock, sleep
        self._waits = False
        announcer.rewrites_with(self._rewrite)

    def until_written(self, write: Callable[[], T]) -> T:
        """Return what `write` returns, once it raises no NoSpace.

        Raises:
            NoSpace: of its last attempt, when time is over or the run is to stop.
        """
        try:
            return write()
        except NoSpace as error:
            if self._waits or self._limit_s <= 0 or _is_for_good(error):
                raise
            refused = error
        self._waits = True
        try:
            return self._repeated(write, refused)
        finally:
            self._waits = False

    def _rewrite(self, write: Callable[[], None]) -> None:
        """Journal the waiting events; events of the wait itself are only shown."""
        if not self._waits:
            self.until_written(write)

    def _repeated(self, write: Callable[[], T], refused: NoSpace) -> T:
        before, started_s, pause_s = self._announcer.current_phase, self._clock(), _FIRST_PAUSE_S
        limit = duration_text(self._limit_s)
        self._announcer.phase("no space", f"waiting up to {limit} for room: {refused}")
        while True:
            waited_s = self._pause(started_s, pause_s)
            try:
                written = write()
            except NoSpace as error:
                refused = error
            else:
                self._announcer.phase(before, f"there was room again after {_text(waited_s)}")
                return written
            if waited_s >= self._limit_s or self._stopping():
                raise NoSpace(f"{refused}; waited {_text(waited_s)} for room") from refused
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pause(self, started_s: float, pause_s: float) -> float:
        """Sleep until the next attempt, or a stop; return the seconds waited in all."""
        until_s = min(self._clock() + pause_s, started_s + self._limit_s)
        while (left_s := until_s - self._clock()) > 0 and not self._stopping():
            self._sleep(min(left_s, _SLICE_S))
        return self._clock() - started_s


class DiskPace:
    """Compares the disk of optimizer states with its rates before the run. Drives slow down once
    their fast cells are full, or hot."""

    def __init__(
        self,
        spill: Spill,
        read_bytes_per_s: float | None,
        write_bytes_per_s: float | None,
        warn: Callable[[str], None],
    ) -> None:
        """rates: measured before the run; None: not known, so nothing is told."""
        self._spill, self._warn = spill, warn
        self._rates = read_bytes_per_s, write_bytes_per_s
        self._told = 1.0  # times as long as measured, that the user knows of
        self._before = (0, 0, 0.0)

    def step_done(self, steps_left: int, eta_s: float | None) -> None:
        """Tell where the disk was much slower than measured, and than told, since the last look of
        at least `_LOOK_S` of its work."""
        read, write = self._rates
        spill = self._spill
        now = spill.read_bytes, spill.written_bytes, spill.busy_s
        got, put, busy_s = (b - a for a, b in zip(self._before, now, strict=True))
        if not (read and write) or busy_s < _LOOK_S:
            return
        self._before = now
        times = busy_s / max(1e-9, got / read + put / write)
        if times < _SLOWER * self._told:
            return
        self._told = times
        end = ""
        if eta_s is not None:
            at = time.strftime("%d %b %H:%M", time.localtime(time.time() + eta_s))
            end = f": the {steps_left} steps left take {duration_text(eta_s)}, until {at}"
        self._warn(
            f"optimizer states on disk ({spill.folder}) take {times:.1f} times as long as the disk "
            f"was measured before the run, {rate_text((got + put) / busy_s)} read and written "
            f"together (drives slow down when their cache is full){end}"
        )


def _is_for_good(error: BaseException) -> bool:
    """Return whether freeing space does not help: a limit on the size of files, or optimizer states
    that are lost."""
    if isinstance(error, ScratchLost):
        return True
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, OSError) and error.errno == errno.EFBIG


def _text(seconds: float) -> str:
    return duration_text(max(seconds, 1.0))
