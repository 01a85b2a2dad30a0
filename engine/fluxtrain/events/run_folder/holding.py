"""Holds the folder of a run by its lock, and notices where it is renamed, deleted or taken.

A lock follows the file, and what a run writes goes by path: without a look now and then a second
run, started at the old path of a renamed folder, would share its files with the first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import RunDir

PERIOD_S = 1.0  # between two looks of one that asks after every step
Follower = Callable[[Path, Path], None]
_DESCRIPTORS = Path("/proc/self/fd")


class Holding:
    """A run's folder in the hands of this process. Asked by the run's thread alone."""

    def __init__(self, run_dir: RunDir) -> None:
        """Take the lock. Raises as `RunDir.lock`, and BadInput where the folder vanishes."""
        self.run_dir = run_dir
        self._lock = run_dir.lock()
        self._followers: list[Follower] = []
        self._looked_s = time.monotonic()
        try:
            self._folder = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self._lock.release()
            raise self._gone() from None

    def followed_by(self, follower: Follower) -> None:
        """Call `follower` with the old and the new path when the folder was renamed."""
        self._followers.append(follower)

    def glance(self) -> None:
        """Look as `look` does, where the last time is a second ago."""
        if time.monotonic() - self._looked_s >= PERIOD_S:
            self.look()

    def look(self) -> None:
        """Go on in the folder where it is now, and lock it anew where its lock was removed.

        Raises:
            BadInput: the folder was deleted, or another process has locked it.
        """
        self._looked_s = time.monotonic()
        if not _same(self.run_dir.path, self._folder):
            self._follow()
        pid = self.run_dir.pid
        if self._lock.is_at(pid):
            return
        if os.path.lexists(pid):
            raise BadInput(
                f"{pid} was replaced while the run trained, so another process may use the folder: "
                "this run ends and writes nothing more there; end the other one, then go on with "
                "--resume from the newest checkpoint"
            )
        lock = self.run_dir.lock(space_bytes=0)
        self._lock.release()
        self._lock = lock

    @property
    def is_held(self) -> bool:
        """Return whether the folder is there, and no other process has it."""
        try:
            self.look()
        except BadInput:
            return False
        return True

    def release(self) -> None:
        """Let another process use the folder."""
        self._lock.release()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _follow(self) -> None:
        old, new = self.run_dir.path, self._place()
        if new is None:
            raise self._gone()
        self.run_dir.path = new
        for follower in self._followers:
            follower(old, new)

    def _place(self) -> Path | None:
        """Return where the folder is now; None where it is nowhere. Source: proc(5), fd."""
        with contextlib.suppress(OSError):
            place = Path(os.readlink(_DESCRIPTORS / str(self._folder)))
            if _same(place, self._folder):
                return place
        return None

    def _gone(self) -> BadInput:
        return BadInput(
            f"{self.run_dir.path} was deleted, or moved to another disk, while the run used it: "
            "nothing more can be saved there; start the run again, or go on with --resume in the "
            "place where its folder is now"
        )


def _same(path: Path, descriptor: int) -> bool:
    """Return whether a path leads to the folder of a descriptor."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
