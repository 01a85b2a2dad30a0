"""Provides the three standard streams, also in a process that was started without some of them.

A daemon's child or `cmd >&-` has no standard output: Python's `sys.stdout` is None then, and the
next file that is opened takes its number, so that a library's output would end up in that file.
"""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Open /dev/null for each missing stream; call it before any file is opened. A character that a
    stream's character set lacks is written as a mark instead of raising an error."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open takes the lowest free number: this one
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
