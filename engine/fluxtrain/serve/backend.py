"""Where trainers run: the four verbs that the queue knows, and processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fluxtrain.errors import EXIT_INTERRUPTED
from fluxtrain.events.events import CommandAnswered
from fluxtrain.events.frames import decode_line
from fluxtrain.events.journal import tail_lines
from fluxtrain.events.run_folder.control import NotReachable, send_command
from fluxtrain.events.run_folder.launch import TRAINER, start_unwatched
from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary
from fluxtrain.files.atomic import free_bytes
from fluxtrain.serve.jobs import run_of

# unmade: nothing was started for this try; waits: it computes nothing yet, or not now.
State = Literal["unmade", "waits", "runs", "ended"]


@dataclass(frozen=True, kw_only=True)
class End:
    """How the newest process of a run ended."""

    code: int | None  # None or negative: it was killed
    refused: bool = False
    message: str = ""
    stopped_by_app: bool = False
    free_bytes: int | None = None
    needed_bytes: int = 0


class Backend(Protocol):
    """Starts, watches and stops the trainer of a job, and collects how it ended.

    A job is a row of the database; its `tries.started` tells the trials of its trainer apart.
    """

    shares_machine: bool  # trainers take memory and cards of the server's machine

    def open(self, wake: Callable[[], None]) -> None:
        """Begin to watch; `wake` is called when something has changed."""

    def start(self, row: Mapping[str, Any], arguments: Sequence[str]) -> None:
        """Start `fluxtrain train ARGUMENTS`. Raises FluxTrainError where that is refused."""

    def state(self, row: Mapping[str, Any]) -> State:
        """Return what the trainer of the newest trial does."""

    def why_waits(self, row: Mapping[str, Any]) -> str:
        """Tell why a trainer that waits does; "" where that is not known."""

    def stop(self, row: Mapping[str, Any]) -> None:
        """Ask the trainer to write a checkpoint and end."""

    def collect(self, row: Mapping[str, Any], run: RunSummary | None) -> End:
        """Return how the trainer ended; the run directory counts more than its exit code."""

    def close(self) -> None:
        """End watching; trainers go on."""


class Processes:
    """Trainers as processes of this machine, each in a session of its own."""

    shares_machine = True

    def __init__(self, command: tuple[str, ...] = TRAINER) -> None:
        """Prepare; command: starts a trainer, before its arguments."""
        self._command = command
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def open(self, wake: Callable[[], None]) -> None:
        """Do nothing: the queue looks often enough."""

    def start(self, row: Mapping[str, Any], arguments: Sequence[str]) -> None:
        """Start the process. Raises FluxTrainError."""
        left = {key: one for key, one in self._started.items() if one.poll() is None}
        self._started = left  # the others are judged, or another server's
        self._started[row["id"]] = start_unwatched(arguments, run_of(row["id"]), self._command)

    def state(self, row: Mapping[str, Any]) -> State:
        """Return whether a trainer has the run, also one that an earlier server started."""
        process = self._started.get(row["id"])
        if process is not None and process.poll() is None:
            return "runs"
        # exit 2 of ours: another has the lock
        return "runs" if run_of(row["id"]).liveness() == "running" else "ended"

    def why_waits(self, row: Mapping[str, Any]) -> str:
        """Return "": a process runs at once."""
        return ""

    def stop(self, row: Mapping[str, Any]) -> None:
        """Ask over the run's socket, or by a signal while there is none."""
        run = run_of(row["id"])
        try:
            send_command(run.socket, "stop")
        except NotReachable:  # it has not come so far yet
            user, process = run.user(), self._started.get(row["id"])
            with contextlib.suppress(ProcessLookupError):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                elif user is not None and user.is_local and user.is_alive():
                    os.kill(user.pid, signal.SIGTERM)

    def collect(self, row: Mapping[str, Any], run: RunSummary | None) -> End:
        """Return how the process ended."""
        process = self._started.get(row["id"])  # it may be asked again
        code = run.exit_code if run is not None else None
        if code is None and process is not None:
            code = process.poll()
        return end_of(row, run, code)

    def close(self) -> None:
        """Do nothing: trainers outlive the server."""


def end_of(
    row: Mapping[str, Any], run: RunSummary | None, code: int | None, message: str = ""
) -> End:
    """Return an end by its exit code and what the run directory tells of it; message: without."""
    folder = run_of(row["id"])
    told = run.message if run is not None else "its run directory is gone"
    return End(
        code=code,
        refused=run is not None and run.state == "refused",
        message=message or told,
        stopped_by_app=code == EXIT_INTERRUPTED
        and row["tries"].get("told") != row["tries"].get("started")
        and _was_told_to_stop(folder),
        free_bytes=free_bytes(folder.path),
        needed_bytes=int(row["plan"].get("disk_bytes") or 0),
    )


def _was_told_to_stop(run: RunDir) -> bool:
    """Return whether a run was asked to stop over its socket, as by the app."""
    events = filter(None, map(decode_line, tail_lines(run.journal, 1 << 18)))
    newest = next((one for one in events if isinstance(one, CommandAnswered)), None)
    return newest is not None and newest.command == "stop" and newest.ok
