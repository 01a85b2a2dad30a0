"""Gives an end in words to a process that a native library ends.

Libraries call `exit(1)` where the system refuses them a thread (libgomp), abort where memory or a
file is not what they expect (Rust, C++), and read files by mappings, which end in a signal where a
disk fails: in the middle of a run and without an exception.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from typing import Any

from fluxtrain.bounded import GRACE_S, at_fault, end_process
from fluxtrain.errors import BadInput, DoesNotFit, FluxTrainError

_GOES_ON = "`--resume auto` goes on from the last checkpoint"
TOLD = (
    "a native library ended the process, with its own words above if it has any: most often the "
    "system refuses it another thread or memory. Raise the limits (`ulimit -u`, `ulimit -v`, a "
    f"container's pids limit), or close other programs; {_GOES_ON}"
)
CUT_OFF = (
    "a file that is mapped into memory cannot be read any more: it was cut off or replaced "
    f"meanwhile, or its disk or network failed. Put it back whole; {_GOES_ON}"
)
_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
_HANDLE = ctypes.create_string_buffer(1)  # its address names our handlers to the C library
_kept: list[Any] = []  # what the C library calls must live


def tell_native_exits() -> None:
    """Let a call of C's `exit`, an abort and a bad access to memory end this process with words and
    an exit code of their own.

    Python's own end takes the first handler away before it calls `exit` itself. Signals that have a
    handler already keep it, as with PYTHONFAULTHANDLER, and all do with `--debug`, so that a core
    is dumped. Does nothing where the C library is another than glibc, or when called again.
    """
    library = ctypes.CDLL(None)
    if _kept or not hasattr(library, "gnu_get_libc_version"):
        return
    _tell_exit(library)
    if "--debug" not in sys.argv:
        _tell_signals(library)


def _tell_exit(library: ctypes.CDLL) -> None:
    mine, is_over = os.getpid(), False

    def ended(_: object) -> None:
        if not is_over and os.getpid() == mine:  # a forked process ends as it likes
            end_process(DoesNotFit(TOLD))

    def is_ending() -> None:
        nonlocal is_over
        is_over = True
        library.__cxa_finalize(ctypes.byref(_HANDLE))  # calls the handler, for the last time

    _kept.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ended))
    library.__cxa_atexit(_kept[0], None, ctypes.byref(_HANDLE))
    atexit.register(is_ending)


def _tell_signals(library: ctypes.CDLL) -> None:
    mine = os.getpid()
    set_handler = library.signal
    set_handler.restype = ctypes.c_void_p

    def caught(number: int) -> None:
        set_handler(number, None)
        if os.getpid() != mine:
            os.kill(os.getpid(), number)
            return
        signal.setitimer(signal.ITIMER_REAL, 2 * GRACE_S)  # what is needed may be locked for ever
        end_process(_reason(number))

    kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(caught)
    _kept.append(kept)
    for number in _SIGNALS:
        before = set_handler(number, kept)
        if before is not None:
            set_handler(number, ctypes.c_void_p(before))


def _reason(number: int) -> FluxTrainError:
    """Return why a signal came."""
    if number == signal.SIGBUS:
        return BadInput(CUT_OFF)
    return at_fault() or DoesNotFit(TOLD)
