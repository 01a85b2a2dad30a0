"""Imports the packages of a command: quickly, and Ctrl-C ends the process meanwhile.

Python would print a traceback into the imports. This module imports nothing of its own package and
nothing slow, because it must be in place first.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` takes 3 ms more, for enums
import gc
import os
import sys

TYPE_CHECKING = False  # as `typing` has it, whose import takes too long
if TYPE_CHECKING:
    from types import FrameType

_WORDS = b"interrupted before anything was started\n"
_EXIT_INTERRUPTED = 130  # as in fluxtrain.errors
# transformers imports these where they are installed, for generating with a second model and for
# detecting objects in pictures: a quarter of its import, and nothing here uses them
_UNUSED = ("sklearn", "scipy")


class Importing:
    """A context for imports: Ctrl-C ends the process at once (an ignored signal stays ignored), the
    garbage collector rests, and packages that are imported for nothing are not found."""

    def __enter__(self) -> Importing:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)
        self._collected = gc.isenabled()
        gc.disable()  # it would look through all modules again and again: a quarter of the time
        self._hidden = [name for name in _UNUSED if name not in sys.modules]
        for name in self._hidden:
            sys.modules[name] = None  # type: ignore[assignment]  # Python then finds no such module
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._hidden:
            sys.modules.pop(name, None)
        gc.freeze()  # packages stay with the process: 0.2 s less each time the collector is asked
        if self._collected:
            gc.enable()
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process without an exception, which the interrupted import could catch or rewrite."""
    try:
        os.write(2, _WORDS)
    finally:  # standard error may be closed
        os._exit(_EXIT_INTERRUPTED)
