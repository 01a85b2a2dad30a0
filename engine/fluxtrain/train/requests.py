"""What the outside asks of a running trainer: control commands and signals, answered between steps.

The control socket's thread and the signal handlers only note a wish here; the loop looks at it
between two steps, so a step is never cut in two.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fluxtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted

CHANGES = ("apply", "undo")
COMMANDS = ("pause", "resume", "checkpoint", "stop", *CHANGES)
Ask = Callable[[str, Mapping[str, Any]], tuple[bool, str]]
_EXIT_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,  # the terminal is gone
}


class Requests:
    """The wishes that wait for the next gap between two steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._checkpoint = False
        self._stop_code: int | None = None
        self._ask_change: Ask | None = None

    def changes_go_to(self, ask: Ask) -> None:
        """The run is loaded: who answers `apply` and `undo`."""
        self._ask_change = ask

    def handle(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Answer one control command (called from the control socket's thread)."""
        with self._changed:
            if self._stop_code is not None:
                return False, "the run is stopping already"
            answer = self._note(command, arguments)
            self._changed.notify_all()
        return answer

    def _note(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        if command in CHANGES:
            if self._ask_change is None:
                return False, "the run is still loading: ask again when it trains"
            return self._ask_change(command, arguments)
        if command == "pause":
            was, self._paused = self._paused, True
            return True, "paused already" if was else "pauses after this step"
        if command == "resume":
            was, self._paused = self._paused, False
            return True, "goes on" if was else "was not paused"
        if command == "checkpoint":
            self._checkpoint = True
            return True, "writes a checkpoint after this step"
        if command == "stop":
            self._stop_code = EXIT_TERMINATED
            return True, "stops after this step, once its checkpoint is written"
        return False, f"unknown command {command!r}: use {', '.join(COMMANDS)}"

    def stop(self, exit_code: int) -> None:
        """Ask for a stop. Safe in a signal handler: it takes no lock that the loop could hold."""
        self._stop_code = exit_code

    @property
    def stop_code(self) -> int | None:
        """The exit code of a stop that was asked for, None while the run goes on."""
        return self._stop_code

    @property
    def waiting(self) -> bool:
        """Whether anything was asked for that the loop has to look at."""
        return self._paused or self._checkpoint or self._stop_code is not None

    @property
    def paused(self) -> bool:
        return self._paused and self._stop_code is None

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for since the last look."""
        with self._changed:
            wanted, self._checkpoint = self._checkpoint, False
        return wanted

    def wait_for_change(self, timeout_s: float = 0.2) -> None:
        """Sleep until a command comes, or `timeout_s` for a signal, which cannot notify."""
        with self._changed:
            self._changed.wait(timeout_s)


class Signals:
    """SIGINT, SIGTERM and SIGHUP while a run lives; previous handlers are put back on exit.

    The first signal is noted in `requests`, and the loop ends the run with a checkpoint. Outside
    `deferred` sections nothing can be lost, so it raises `Interrupted` at once as well; a library
    may swallow that (a finaliser does always), and then the loop ends the run before its next step.
    A Ctrl-C after any first signal ends the process on the spot, and says what `last_words` has.
    What the process was started to ignore (`nohup`, a script's job in the background) it ignores.
    """

    def __init__(
        self,
        requests: Requests,
        last_words: Callable[[], str],
        exit_now: Callable[[int], Any] = os._exit,
    ) -> None:
        self._requests = requests
        self._last_words, self._exit_now = last_words, exit_now
        self._previous: dict[int, Any] = {}
        self._first: int | None = None
        self.deferred = False
        self.words = "stopped outside the training steps; nothing was lost"

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_CODES:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        code = _EXIT_CODES[signal.Signals(number)]
        if self._first is not None:
            if number == signal.SIGINT:
                _say(f"second interrupt: ending now; {self._last_words()}")
                self._exit_now(code)
            return
        self._first = number
        self._requests.stop(code)
        if self.deferred:
            _say("stopping after this step, with a checkpoint; Ctrl-C again ends at once")
            return
        raise Interrupted(self.words, code)


def _say(text: str) -> None:
    """Straight to the descriptor: a handler may run inside a buffered write of the same stream."""
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())
    except (OSError, ValueError):
        return
