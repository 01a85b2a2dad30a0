"""Programs that a benchmark starts, one at a time; they end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

GRACE_S = 5.0  # for a training to end after SIGTERM
# On Linux the kernel kills the child when its parent is gone, whatever ended that one.
START = """
import ctypes, os, signal, sys
parent, group, *command = sys.argv[1:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)  # it had ended before
if group:
    open(group, "w").write("0")  # this process
os.execv(sys.executable, [sys.executable, *command])
"""


class Stopped(BaseException):
    """The benchmark was told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM (what `timeout` sends), SIGINT and SIGHUP raise Stopped in here."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def compiled_once(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps in `folder` the modules that Python compiles, where `environment` tells it to keep
    none, as containers do: to compile torch and transformers takes each process seconds."""
    if not environment.get("PYTHONDONTWRITEBYTECODE"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder.resolve())}


@contextmanager
def started_python(
    arguments: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: IO[Any] | int,
    stderr: IO[Any] | int = subprocess.STDOUT,
    environment: Mapping[str, str] | None = None,
    group: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """This Python with `arguments`, in control group `group`; it has ended afterwards."""
    entered = "" if group is None else str(group / "cgroup.procs")
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(os.getpid()), entered, *arguments],
        bufsize=0,  # so that `select` tells whether there is a line
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,  # so that what it starts can be ended with it
    )
    try:
        yield process
    finally:
        _end(process)


def run_python(
    arguments: Sequence[str],
    *,
    stdout: IO[Any] | int,
    stderr: IO[Any] | int = subprocess.STDOUT,
    environment: Mapping[str, str] | None = None,
    group: Path | None = None,
    limit_s: float | None = None,
) -> int:
    """Run it to its end; returns the exit code. Raises TimeoutExpired after `limit_s`."""
    with started_python(
        arguments, stdout=stdout, stderr=stderr, environment=environment, group=group
    ) as process:
        return process.wait(limit_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
