"""Moments of AdamW that wait until the next forward pass is queued."""

from __future__ import annotations

import threading
import weakref

from fluxtrain.device.worker import Job

LONGEST_S = 2.0  # of a hold: a program that runs no further pass goes on, and ends, without it
_living: weakref.WeakSet[Hold] = weakref.WeakSet()


def end_all() -> None:
    """Let all moments begin, as before the end of the program."""
    for hold in list(_living):
        hold.end()


# `atexit` comes after the interpreter has waited for the threads of pools. What is registered here
# comes before, because it is registered after the pools' own, which `device.worker` imports.
_before_threads_end = getattr(threading, "_register_atexit", None)
if _before_threads_end is not None:
    _before_threads_end(end_all)


class Hold:
    """What the moments of one step wait for."""

    def __init__(self, *, begun: bool = True) -> None:
        """`begun`: nothing is held."""
        self._ended = threading.Event()
        if begun:
            self._ended.set()
        else:
            _living.add(self)

    def end(self) -> None:
        """Let the moments begin."""
        self._ended.set()

    def wait(self) -> None:
        """Block until the moments may begin, `LONGEST_S` at most."""
        self._ended.wait(LONGEST_S)
        self._ended.set()  # the other groups of this step wait no longer


class HeldMoments:
    """The moments of one group: who waits for them lets those of all groups begin."""

    def __init__(self, job: Job, hold: Hold) -> None:
        self._job, self._hold = job, hold

    def result(self) -> None:
        """Wait until they are updated; raises what made that fail."""
        self._hold.end()
        self._job.result()

    def done(self) -> bool:
        """Are they updated, or given up?"""
        return self._job.done()
