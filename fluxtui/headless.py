"""Without a terminal: the trainer in the foreground, or a run's progress as lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from fluxtrain.errors import EXIT_BUG, EXIT_FINISHED, EXIT_INTERRUPTED, BadInput
from fluxtrain.rundir.launch import TRAINER
from fluxtrain.rundir.run_dir import RunDir
from fluxtrain.telemetry.events import (
    AnyEvent,
    Done,
    EvaluationFinished,
    Failed,
    Hello,
    StepFinished,
)
from fluxtrain.telemetry.printable import printable
from fluxtrain.telemetry.reader import JournalFollower
from fluxtrain.units import duration_text

POLL_PERIOD_S = 0.5
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: end in order
}


def train_in_foreground(arguments: Sequence[str], command: Sequence[str] = TRAINER) -> int:
    """Run `fluxtrain train ARGUMENTS` with our own output; returns its exit code.

    The trainer has a session of its own, so a Ctrl-C reaches it once, from here: it writes a
    checkpoint and ends with 130; a second one ends it at once. What this process was started to
    ignore (`nohup`) neither takes.
    """
    with subprocess.Popen(
        [*command, *arguments], stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            process.send_signal(_FORWARDED[signal.Signals(number)])

        before = {
            number: signal.signal(number, forward)
            for number in _FORWARDED
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def follow_lines(run_dir: Path, ended: Callable[[], int | None] = lambda: None) -> int:
    """Print the run's progress until it ends; returns its exit code, or 130 after a Ctrl-C.

    A reader that leaves before ends it too, with 0: that is no verdict on the training. Raises
    BadInput where the journal cannot be read, or the run's folder is gone.

    `ended` gives the exit code of a trainer that this process started.
    """
    run, journal = RunDir(run_dir), JournalFollower(RunDir(run_dir).journal)
    told: int | None = None  # how the newest process of the run said that it ended
    was_there = there = False  # the folder
    try:
        while True:
            code = ended()  # asked first: nothing is missed then
            was_there, there = was_there or there, run.path.is_dir()
            if was_there and not there:
                raise BadInput(f"{run.run_id}: its folder is gone: {run.path}")
            alive = code is None and _alive(run)
            for event in _news(journal):
                _say(event)
                if isinstance(event, Done | Failed):
                    told = event.exit_code if told is None else told
                elif isinstance(event, Hello):
                    told = None  # it was gone on with
            if not alive:
                return _ended(run, code if told is None else told, silent=told is None)
            time.sleep(POLL_PERIOD_S)
    except KeyboardInterrupt:
        print(f"{run.run_id}: detached; training goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # who read the lines has left (`| head`, a connection that broke)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the exit
        return EXIT_FINISHED


def _alive(run: RunDir) -> bool:
    """Whether more may come; a folder that we may not look into does not tell, its journal does."""
    try:
        return run.liveness() in ("running", "new")
    except OSError:
        return True


def _news(journal: JournalFollower) -> list[AnyEvent]:
    """Events since the last call. Raises BadInput."""
    try:
        return journal.poll()
    except OSError as error:
        raise BadInput(
            f"{journal.path} cannot be read: {error.strerror}: name another run, or make it "
            "readable"
        ) from error


def _ended(run: RunDir, code: int | None, *, silent: bool) -> int:
    """The exit code; of a trainer that ended without a word, what it printed last is told."""
    if silent:
        try:
            printed = run.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            printed = []
        last = printed[-1] if printed else "nothing was printed"
        said = printable(f"{run.run_id}: the trainer is gone without a word: {last}")
        print(said, file=sys.stderr)
    return EXIT_BUG if code is None or code < 0 else code


def _say(event: AnyEvent) -> None:
    line = event_line(event)
    if line:
        print(printable(line), flush=True)


def event_line(event: AnyEvent) -> str:
    """One line for the events that tell how a run is going; "" for the others."""
    if isinstance(event, StepFinished):
        left = f"  left {duration_text(event.eta_s)}" if event.eta_s else ""
        return (
            f"step {event.step}/{event.total_steps}  loss {event.loss:.4f}  "
            f"{event.tokens_per_s:,.0f} tokens/s{left}"
        )
    if isinstance(event, EvaluationFinished):
        return f"evaluation after step {event.step}: loss {event.loss:.4f}"
    if isinstance(event, Failed):
        return f"{'refused' if event.refused else 'failed'}: {event.message}"
    if isinstance(event, Done):
        word = "finished" if event.exit_code == EXIT_FINISHED else "ended"
        return f"{word} after step {event.step} in {duration_text(event.seconds)}"
    return ""
