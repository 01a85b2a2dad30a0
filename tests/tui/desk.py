"""A user's place: terminals that run the app, read by a screen parser, and a folder for runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pyte

from fluxtrain.events.run_folder.run_dir import RunDir

TINY = (
    *("--set", "data.sequence_length=32", "--set", "train.batch_rows=2"),
    *("--set", "data.held_out=0.002", "--set", "train.evaluate_every=end"),
    *("--set", "train.checkpoint_every=end"),
)
PATIENCE_S = 120.0


class Terminal:
    """The app on a pseudo-terminal of its own, and the screen as its user sees it."""

    def __init__(
        self, command: list[str], environment: dict[str, str], size: tuple[int, int]
    ) -> None:
        columns, lines = size
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            preexec_fn=_own_terminal,  # noqa: PLW1509 - no threads here; a session needs it
        )
        os.close(slave)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, limit_s: float) -> bool:
        """Take what the app draws within `limit_s`; False when it has closed the terminal."""
        ready, _, _ = select.select([self._master], [], [], limit_s)
        if not ready:
            return True
        data = b""
        try:
            while ready and len(data) < 1 << 16:  # each read gives a part of what was drawn
                data += os.read(self._master, 1 << 16)
                ready, _, _ = select.select([self._master], [], [], 0)
        except OSError:  # EIO: the last process on the terminal has ended
            if not data:
                return False
        self.output += data
        self._stream.feed(data)
        return bool(data)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def mode(self) -> list[Any]:
        """How the terminal treats what is typed and written (termios)."""
        return termios.tcgetattr(self._master)

    def wiped(self) -> None:
        """Forget what is on screen, and a sequence that broke off: only what is written from now on
        will be there."""
        while select.select([self._master], [], [], 0)[0] and self.read(0):
            continue
        self.output = b""
        self.screen.reset()
        self._stream = pyte.ByteStream(self.screen)

    def hang_up(self) -> None:
        """As when a connection breaks."""
        os.close(self._master)
        self._master = -1

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def until(self, *texts: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until the screen shows all of `texts`."""
        deadline, shown = time.monotonic() + patience_s, self.text
        while not all(text in shown for text in texts):
            alive = self.read(0.1)
            shown = self.text
            if not alive or time.monotonic() > deadline:
                raise AssertionError(f"{texts} never came on screen:\n{shown}")

    def until_written(self, *texts: bytes) -> None:
        """Wait until all of `texts` were written, whatever the screen takes them for."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(text in self.output for text in texts):
            alive = self.read(0.1)
            if not alive or time.monotonic() > deadline:
                raise AssertionError(f"{texts} were never written: {self.output[-2000:]!r}")

    def quiet(self, rows: int = 40, columns: int = 70, for_s: float = 1.5) -> None:
        """Read until that part of the screen stays as it is."""
        shown, since_s = [""], time.monotonic()
        while time.monotonic() - since_s < for_s:
            assert self.read(0.1)
            now = [row[:columns] for row in self.screen.display[:rows]]
            if now != shown:
                shown, since_s = now, time.monotonic()

    def ends(self, patience_s: float = PATIENCE_S) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + patience_s
        while self.read(0.1) and self.process.poll() is None:
            assert time.monotonic() < deadline, f"the app did not end:\n{self.text}"
        code = self.process.wait(PATIENCE_S)
        while self.read(0.1) and select.select([self._master], [], [], 0)[0]:
            pass
        return code

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self._master >= 0:
            os.close(self._master)


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Desk:
    """A user's place: a folder for runs, and terminals that are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.environment = {
            **inherited,  # the terminal itself says how large it is
            "TERM": "xterm-256color",
            "FLUXTRAIN_RUNS": str(self.runs),
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._terminals: list[Terminal] = []

    def open(self, *arguments: str, size: tuple[int, int] = (120, 40)) -> Terminal:
        return self.run([sys.executable, "-P", "-m", "fluxtui", *arguments], size)

    def run(self, command: list[str], size: tuple[int, int] = (120, 40)) -> Terminal:
        terminal = Terminal(command, self.environment, size)
        self._terminals.append(terminal)
        return terminal

    def run_dir(self) -> RunDir:
        """The one run that there is."""
        [path] = self.runs.iterdir()
        return RunDir(path)

    def trainer_pid(self) -> int:
        user = self.run_dir().user()
        assert user is not None
        return user.pid

    def until_state(self, state: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while (found := self.run_dir().liveness()) != state:
            assert time.monotonic() < deadline, f"the run is {found}, not {state}"
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """All that run for this user: in terminals, below them, and trainings."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            theirs = (process.info["environ"] or {}).get("FLUXTRAIN_RUNS") == str(self.runs)
            if theirs or any(str(self.runs) in part for part in process.info["cmdline"] or ()):
                found.append(process)
        return found

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.close()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
