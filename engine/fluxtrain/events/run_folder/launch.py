"""Starts the trainer as a process of its own, which outlives the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.events.live import widen_pipe
from fluxtrain.events.reader import PipeReader
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import storage_error
from fluxtrain.files.opening import open_to_write

# -P: a file of the user's folder that is named like a module must not take its place.
TRAINER = (sys.executable, "-P", "-m", "fluxtrain", "train")


@dataclass(frozen=True)
class TrainerProcess:
    """A trainer that this process started: its events and its end."""

    process: subprocess.Popen[bytes]
    reader: PipeReader
    run_dir: RunDir

    @property
    def pid(self) -> int:
        """Return the process id; also the id of its session and process group."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill it and its helpers now; steps since the last checkpoint are lost."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def start_trainer(
    arguments: Sequence[str], run_dir: RunDir | Path | str, command: Sequence[str] = TRAINER
) -> TrainerProcess:
    """Start a trainer as `start_unwatched`, with a pipe for its live events (`--live-fd N`)."""
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    read_end, write_end = os.pipe()
    widen_pipe(write_end)
    live = [*arguments, "--live-fd", str(write_end)]
    try:
        process = start_unwatched(live, run, command, pass_fds=(write_end,))
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return TrainerProcess(process, PipeReader(read_end), run)


def start_unwatched(
    arguments: Sequence[str],
    run: RunDir,
    command: Sequence[str] = TRAINER,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run `fluxtrain train ARGUMENTS --run-dir RUN` in a session of its own.

    `arguments` name the configuration (`["demo.yaml"]`, `["--demo", "--steps", "10"]`). Standard
    output and error are appended to engine.log, so nothing is lost when this process dies, and
    neither a closed terminal nor a Ctrl-C in it reaches the trainer.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        log = open(run.log, "ab", opener=open_to_write)  # noqa: SIM115 - closed below
    except OSError as error:
        raise storage_error(run.log, error) from error
    with log:
        return subprocess.Popen(
            [*command, *arguments, "--run-dir", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
