"""Signals this process when its terminal hangs up, as the kernel signals only some processes.

A closed terminal sends SIGHUP to the first program of its session, and to the job in its foreground
once that program has ended. It may live on: make does, in a terminal opened for `make run`. For
the rest of the session each read then returns at once, with nothing.
"""

from __future__ import annotations

import os
import select
import signal
import threading

PERIOD_S = 1.0  # some hang-ups wake nobody who waits for nothing else


def signal_hang_up(descriptor: int) -> None:
    """Let a thread send this process SIGHUP when the terminal on `descriptor` has hung up; a file
    that is no terminal is not watched."""
    if os.isatty(descriptor):
        threading.Thread(target=_wait, args=(descriptor,), daemon=True, name="hang-up").start()


def _wait(descriptor: int) -> None:
    terminal = select.poll()
    terminal.register(descriptor, 0)  # no event is asked for: a hang-up is always told
    while not terminal.poll(PERIOD_S * 1000):
        continue
    os.kill(os.getpid(), signal.SIGHUP)
