"""Ends with one line and exit code 130 on Ctrl-C while the packages of a command are imported.

Python would print a traceback into the imports. This module imports nothing of its own package and
nothing slow, because it must be in place first.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` takes 3 ms more, for enums
import os

TYPE_CHECKING = False  # as `typing` has it, whose import takes too long
if TYPE_CHECKING:
    from types import FrameType, TracebackType

_WORDS = b"interrupted before anything was started\n"
_EXIT_INTERRUPTED = 130  # as in fluxtrain.errors


class ImmediateInterrupts:
    """A context in which Ctrl-C ends the process at once; an ignored signal stays ignored."""

    def __enter__(self) -> ImmediateInterrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process without an exception, which the interrupted import could catch or rewrite."""
    try:
        os.write(2, _WORDS)
    finally:  # standard error may be closed
        os._exit(_EXIT_INTERRUPTED)
