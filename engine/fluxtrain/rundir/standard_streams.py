"""The three standard streams, also for a process that was started without some of them.

A daemon's child or `cmd >&-` has no standard output: Python's `sys.stdout` is None then, and the
next file that is opened takes its number, so that whatever a library prints would end up in it.
"""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Put /dev/null in the place of each stream that is not there. Before any file is opened. What
    is written and has no sign in a stream's character set becomes a mark there, and no error."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the exit
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
