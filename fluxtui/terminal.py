"""Handles a terminal that stops and continues the app, takes no output, or hangs up.

Textual's driver puts the terminal into its mode and back. Added here: `ctrl-z` stops the processes
that a shell would stop and leaves the shell a sane terminal; a process that was stopped from
outside takes its terminal again and restores it at the end to its state before the app; a terminal
that takes no output blocks nothing; one that has hung up ends the app.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import events
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size

from fluxtui.command_line import MOST_COLUMNS, MOST_ROWS
from fluxtui.widgets.screen_updates import shorter

if TYPE_CHECKING:
    from textual.app import App

BACKLOG_CHARS = 1 << 19  # a few whole screens; older output is not worth drawing
LAST_WORDS_S = 2.0  # how long to wait for a terminal to take its restoring sequences


class Output:
    """Writes to a terminal in a thread of its own, so that the app does not wait for a slow one.

    Args:
        descriptor: the terminal.
        caught_up: called in that thread when text had to be dropped and there is room again.
        gone: called in that thread when the terminal has hung up.
    """

    def __init__(
        self, descriptor: int, caught_up: Callable[[], object], gone: Callable[[], object]
    ) -> None:
        self._descriptor = descriptor
        self._caught_up = caught_up
        self._gone = gone
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._dropped = self._hung_up = self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name="output")
        self._thread.start()

    def write(self, text: str, whatever_waits: bool = False) -> None:
        """Queue text; it is dropped, with everything after it, while too much is waiting."""
        with self._changed:
            self._dropped |= self._waiting_chars > BACKLOG_CHARS
            if self._hung_up or (self._dropped and not whatever_waits):
                return
            self._waiting.append(text)
            self._waiting_chars += len(text)
            self._changed.notify()

    def end(self, limit_s: float = LAST_WORDS_S) -> bool:
        """Write the waiting text and end; False if the terminal did not take it in time."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(limit_s)
        return not (self._thread.is_alive() or self._hung_up)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                text = "".join(self._waiting)
                self._waiting, self._waiting_chars = [], 0
            if not text or not self._written(text.encode(errors="replace")):
                return
            with self._changed:
                caught_up = self._dropped and not self._waiting
                self._dropped &= not caught_up
            if caught_up:
                self._caught_up()

    def _written(self, data: bytes) -> bool:
        """Tell whether the terminal took all of it; False when it has hung up."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another program has set the terminal so
                time.sleep(0.01)
            except OSError:
                with self._changed:
                    self._hung_up = True
                    self._waiting.clear()
                self._gone()
                return False
        return True


class TerminalDriver(LinuxDriver):
    """Textual's driver for a terminal whose shell stops, continues and loses programs."""

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self._home = asyncio.get_running_loop()
        self._output: Output | None = None
        self._leaving = self._continuing = False
        # Textual's own handlers run between any two instructions, also where a lock is held.
        self._home.add_signal_handler(signal.SIGTSTP, self.to_the_shell)
        self._home.add_signal_handler(signal.SIGCONT, self._continued)

    def write(self, data: str) -> None:
        """Pass text to the output's thread; write nothing while the terminal is the shell's."""
        if self._output is not None:
            self._output.write(shorter(data), whatever_waits=self._leaving)

    def _get_terminal_size(self) -> tuple[int, int]:
        """Return columns and rows, no more than a screen can have: `stty` takes any number."""
        columns, rows = super()._get_terminal_size()
        return min(columns, MOST_COLUMNS), min(rows, MOST_ROWS)

    def start_application_mode(self) -> None:
        """Take the terminal."""
        self._output = Output(
            sys.__stderr__.fileno() if sys.__stderr__ else self.fileno,
            caught_up=lambda: self._home.call_soon_threadsafe(self._draw_all),
            gone=lambda: self._home.call_soon_threadsafe(self._app.exit),
        )
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def stop_application_mode(self) -> None:
        """Restore the terminal to its state before the app."""
        self._leaving = True
        try:
            super().stop_application_mode()
        finally:
            output, self._output = self._output, None
            self._leaving = False
            if output is not None:
                output.end()

    def disable_input(self) -> None:
        """Stop reading. Textual discards keys that were typed and not read; keep them while the app
        takes its terminal again, because they were typed for it.
        """
        if not self._continuing:
            super().disable_input()
            return
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        self._disable_mouse_support()
        self.exit_event.set()
        if self._key_thread is not None:
            self._key_thread.join()
        self.exit_event.clear()

    def run_input_thread(self) -> None:
        """Read keys; a terminal that has hung up ends the app without an error."""
        try:
            super().run_input_thread()
        except OSError:
            self._home.call_soon_threadsafe(self._app.exit)

    def to_the_shell(self) -> bool:
        """Stop, as ctrl-z in a shell does, until continued; False if no shell would continue us.

        All programs of the job stop, as they would if the terminal itself had sent the signal:
        a shell waits for the first of them (`make run`), not for this one.
        """
        if self._output is None or not shell_watches():
            return False
        self.suspend_application_mode()
        with self._going_on_unheard():
            self._home.remove_signal_handler(signal.SIGTSTP)
            os.kill(0, signal.SIGTSTP)
            self._wait_for_foreground()
            self._home.add_signal_handler(signal.SIGTSTP, self.to_the_shell)
        self._take()
        return True

    def _continued(self) -> None:
        """Take the terminal again after a stop that cannot be handled (SIGSTOP): a shell may have
        used it meanwhile.

        Its state before the app is known from the start.
        """
        if self._output is None:  # the app is closing
            return
        before, self.attrs_before = self.attrs_before, None
        with self._going_on_unheard():
            self._wait_for_foreground()
        self._continuing = True
        try:
            self.suspend_application_mode()
        finally:
            self._continuing = False
        self._take()
        self.attrs_before = before

    def _take(self) -> None:
        self.resume_application_mode()
        self._draw_all()

    @contextmanager
    def _going_on_unheard(self) -> Iterator[None]:
        """Ignore SIGCONT inside the context, whose code waits for it anyway."""
        self._home.remove_signal_handler(signal.SIGCONT)
        try:
            yield
        finally:
            self._home.add_signal_handler(signal.SIGCONT, self._continued)

    def _wait_for_foreground(self) -> None:
        """Stop again while the terminal is another job's (`bg`)."""
        try:
            while os.tcgetpgrp(self.fileno) != os.getpgrp() and shell_watches():
                os.kill(0, signal.SIGTTIN)
        except OSError:  # it has hung up
            return

    def _draw_all(self) -> None:
        """Draw the whole screen, whatever the terminal showed meanwhile."""
        size = Size(*self._get_terminal_size())
        self._app.post_message(events.Resize(size, size))
        self._app.refresh(layout=True)


def shell_watches() -> bool:
    """Return whether a program of this session waits for our job, as a shell does.

    Without one (`ssh -t host fluxtrain-tui`, a terminal that starts the app itself) a stopped app
    would stay stopped for ever.
    """
    group, session = os.getpgrp(), os.getsid(0)
    ancestor = os.getpid()
    try:
        while ancestor > 1 and os.getpgid(ancestor) == group:
            ancestor = _parent(ancestor)
        return ancestor > 0 and os.getsid(ancestor) == session
    except (OSError, ValueError):
        return False


def _parent(pid: int) -> int:
    """Read a parent's pid in /proc/PID/stat: the fourth field, after the name (proc(5))."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(stat.rpartition(")")[2].split()[1])
