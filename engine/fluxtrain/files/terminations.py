"""SIGTERM and SIGHUP as exceptions, so that what a command has begun is cleared away."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from fluxtrain.errors import EXIT_TERMINATED, Interrupted


class Terminated(BaseException):
    """SIGTERM or SIGHUP, as `KeyboardInterrupt` is Ctrl-C: code in between that catches Exception
    does not catch it."""


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


@contextlib.contextmanager
def terminations_raised() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated` instead of ending the process silently; a signal
    that is ignored or has a handler already keeps it."""
    taken = []
    if threading.current_thread() is threading.main_thread():
        signals = (signal.SIGTERM, signal.SIGHUP)
        taken = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, _terminate)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def terminations_told(what: str) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Interrupted`, which says that `what` was not finished."""
    try:
        with terminations_raised():
            yield
    except Terminated:
        words = f"terminated before {what}: nothing was kept"
        raise Interrupted(words, EXIT_TERMINATED) from None
