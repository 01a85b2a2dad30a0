"""Requests to a running trainer, control commands and signals, which the loop serves between steps.

The thread of the control socket and the signal handlers only note a request here. The loop looks at
it between two steps, so no step is cut in two.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fluxtrain.core.ranks.join import Ranks
from fluxtrain.errors import EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted

CHANGES = ("apply", "undo")
COMMANDS = ("pause", "resume", "checkpoint", "stop", *CHANGES)
Ask = Callable[[str, Mapping[str, Any]], tuple[bool, str]]
_EXIT_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,  # the terminal is gone
}
AFTER_STEP = "stopping after this step, with a checkpoint"
_CHECKPOINTS = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers send them before a time limit


class Requests:
    """The requests that wait for the end of the current step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._checkpoint = False
        self._stop_code: int | None = None
        self._lack = ""
        self._moves_states = False  # to a disk, where the host has little memory left
        self._host_lack_bytes = 0
        self._ask_change: Ask | None = None
        # pause, checkpoint, stop code, as several processes agreed; None: this one is alone
        self._agreed: tuple[int, int, int] | None = None

    def agree(self, ranks: Ranks) -> None:
        """Make the requests to any process those of all, until the next call."""
        if ranks.world > 1:
            mine = [self._paused, self._checkpoint, self._stop_code or 0]
            paused, checkpoint, stop = ranks.most(mine)
            self._agreed = paused, checkpoint, stop

    def changes_go_to(self, ask: Ask, *, moves_states: bool = False) -> None:
        """Let `ask` answer `apply` and `undo` from now on, as the run is loaded. moves_states:
        optimizer states may leave the host's memory for a disk."""
        self._ask_change, self._moves_states = ask, moves_states

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
            return True, "resumes" if was else "was not paused"
        if command == "checkpoint":
            self._checkpoint = True
            return True, "writes a checkpoint after this step"
        if command == "stop":
            self._stop_code = EXIT_TERMINATED
            return True, "writes a checkpoint after this step, then stops"
        return False, f"unknown command {command[:40]!r}: use {', '.join(COMMANDS)}"

    def stop(self, exit_code: int) -> None:
        """Ask for a stop. Safe in a signal handler: it takes no lock that the loop could hold."""
        self._stop_code = exit_code

    def end_for_lack(self, why: str) -> None:
        """Ask for the end of the run, as the machine lacks something; its checkpoint is written."""
        self._lack, self._stop_code = why, EXIT_DOES_NOT_FIT

    def free_host(self, size_bytes: int) -> bool:
        """Ask for so many bytes of the host's memory; return False where nothing can leave it."""
        self._host_lack_bytes = size_bytes if self._moves_states else 0
        return self._moves_states

    def take_host_lack(self) -> int:
        """Return the bytes of the host's memory that are to be freed, once."""
        lack_bytes, self._host_lack_bytes = self._host_lack_bytes, 0
        return lack_bytes

    def nothing_leaves_host(self) -> None:
        """Note that nothing more can leave the host's memory."""
        self._moves_states, self._host_lack_bytes = False, 0

    @property
    def lack(self) -> str:
        """Return what the machine lacks, so that the run ends; empty where that is not why."""
        return self._lack if self._stop_code == EXIT_DOES_NOT_FIT else ""

    @property
    def stop_code(self) -> int | None:
        """Return the exit code of a requested stop; None while the run continues."""
        return self._stop_code if self._agreed is None else self._agreed[2] or None

    @property
    def waiting(self) -> bool:
        """Return whether a request waits for the loop."""
        if self._agreed is not None:
            return any(self._agreed)
        return self._paused or self._checkpoint or self._stop_code is not None

    @property
    def paused(self) -> bool:
        """Return whether the run is to pause; a requested stop ends a pause."""
        paused = self._paused if self._agreed is None else bool(self._agreed[0])
        return paused and self.stop_code is None

    def ask_checkpoint(self) -> None:
        """Ask for a checkpoint. Safe in a signal handler, as `stop` is."""
        self._checkpoint = True

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        if self._agreed is not None:
            paused, asked, stop = self._agreed
            self._agreed, self._checkpoint = (paused, 0, stop), self._checkpoint and not asked
            return bool(asked)
        if not self._checkpoint:  # never set to False unless it was True: a signal may come here
            return False
        self._checkpoint = False
        return True

    def wait_for_change(self, timeout_s: float = 0.2) -> None:
        """Sleep until a command comes, at most `timeout_s`, as signals cannot wake the loop."""
        with self._changed:
            self._changed.wait(timeout_s)


class Signals:
    """Handle the signals of a run; the previous handlers return on exit.

    SIGUSR1 and SIGUSR2 ask for a checkpoint after the step, and the run goes on. SIGINT, SIGTERM
    and SIGHUP end it: the first one is noted in `requests`, and the loop ends the run with a
    checkpoint. Outside `deferred` sections nothing can be lost, so the handler raises `Interrupted`
    at once as well. A library may swallow that exception (a finaliser always does); the loop then
    ends the run before its next step. A Ctrl-C after any first signal ends the process at once and
    prints `last_words()`. Signals that the process was started to ignore (`nohup`, a background job
    of a script) stay ignored.
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
        self.promise = AFTER_STEP

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (*_EXIT_CODES, *_CHECKPOINTS):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if number in _CHECKPOINTS:
            self._requests.ask_checkpoint()
            return
        code = _EXIT_CODES[signal.Signals(number)]
        if self._first is not None:
            if number == signal.SIGINT:
                _say(f"second interrupt: ending now; {self._last_words()}")
                self._exit_now(code)
            return
        self._first = number
        self._requests.stop(code)
        if self.deferred:
            _say(f"{self.promise}; Ctrl-C again ends at once")
            return
        raise Interrupted(self.words, code)


def _say(text: str) -> None:
    """Write to the descriptor: a handler may run within a buffered write to the same stream."""
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())
    except (OSError, ValueError):
        return
