"""Lets a process that answers another one end with it, however that one ends.

Who starts such a process passes it `environment_of_child()`. A trainer that a person started is
none: it goes on. This module imports nothing slow, because it must be in place first.
"""

from __future__ import annotations

import os

_VARIABLE = "FLUXTRAIN_PARENT"
_AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun, whose agent starts the ranks
_PR_SET_PDEATHSIG = 1  # prctl(2)
_SIGKILL = 9  # the only one that ends a loop in native code


def environment_of_child() -> dict[str, str]:
    """Return the variables that make a started `fluxtrain` command end with this process."""
    return {**os.environ, _VARIABLE: str(os.getpid())}


def has_agent() -> bool:
    """Return whether torchrun started this process, and watches it."""
    return _AGENT in os.environ


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, if the parent asked for it.

    The signal comes when the thread ends that started this process, which waits for the answer.
    """
    parent = os.environ.pop(_VARIABLE, "")  # not for processes that this one starts
    if not parent and has_agent():
        parent = str(os.getppid())  # an agent that is killed would leave its ranks
    if not parent.isdecimal():
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != int(parent) or parent == "1":  # it ended before the kernel knew
        os._exit(128 + _SIGKILL)
