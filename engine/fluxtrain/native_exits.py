"""Gives an end in words to a process that a native library ends.

Libraries call `exit(1)` where the system refuses them a thread (libgomp), in the middle of a run
and without an exception. Exit code 1 means a bug of FluxTrain, and this is none.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from typing import Any

from fluxtrain.bounded import end_process
from fluxtrain.errors import DoesNotFit

TOLD = (
    "a native library ended the process, with its own words above if it has any: most often the "
    "system refuses it another thread or memory. Raise the limits (`ulimit -u`, `ulimit -v`, a "
    "container's pids limit), or close other programs; `--resume auto` goes on from the last "
    "checkpoint"
)
_HANDLE = ctypes.create_string_buffer(1)  # its address names our handlers to the C library
_kept: list[Any] = []  # what the C library calls must live


def tell_native_exits() -> None:
    """Let a call of C's `exit` end this process with words and the code of DoesNotFit.

    Python's own end takes the handler away before it calls `exit` itself. Does nothing where the C
    library is another than glibc, or where this was called before.
    """
    library = ctypes.CDLL(None)
    if _kept or not hasattr(library, "gnu_get_libc_version"):
        return
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
