"""Works without a terminal: runs the trainer in the foreground, or prints a run's progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from fluxtrain.errors import EXIT_FINISHED, EXIT_INTERRUPTED, BadInput
from fluxtrain.events.events import (
    AnyEvent,
    Done,
    EvaluationFinished,
    Failed,
    Hello,
    StepFinished,
)
from fluxtrain.events.printable import printable
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.run_folder.launch import TRAINER
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.events.run_folder.states import state_of_exit
from fluxtrain.units import count_text, duration_text, loss_text
from fluxtui.sources.journal import last_words

POLL_PERIOD_S = 0.5
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: end in order
}


def train_in_foreground(arguments: Sequence[str], command: Sequence[str] = TRAINER) -> int:
    """Run `fluxtrain train ARGUMENTS` with our own output; returns its exit code.

    The trainer has a session of its own, so a Ctrl-C reaches it once, from here: it writes a
    checkpoint and ends with 130; a second one ends it at once. Signals that this process was
    started to ignore (`nohup`) stay ignored in both.
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

    If the reader of the lines leaves earlier, it returns 0, because that says nothing of the
    training. Raises BadInput if the journal cannot be read, or the run's folder is gone.

    `ended` gives the exit code of a trainer that this process started.
    """
    run, journal = RunDir(run_dir), JournalFollower(RunDir(run_dir).journal)
    told: int | None = None  # how the newest process of the run said that it ended
    was_there = there = False  # the folder
    try:
        while True:
            code = ended()  # asked before the news, so that none is missed
            was_there, there = was_there or there, run.path.is_dir()
            if was_there and not there:
                raise BadInput(f"{run.run_id}: its folder is gone: {run.path}")
            alive = code is None and _alive(run)
            for event in _news(journal):
                _say(event)
                if isinstance(event, Done | Failed):
                    told = event.exit_code if told is None else told
                elif isinstance(event, Hello):
                    told = None  # the run was resumed
            if not alive:
                return _ended(run, code if told is None else told, silent=told is None)
            time.sleep(POLL_PERIOD_S)
    except KeyboardInterrupt:
        print(f"{printable(run.run_id)}: detached; training goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has left (`| head`, a broken connection)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the exit
        return EXIT_FINISHED


def _alive(run: RunDir) -> bool:
    """Return whether more events may come; where the folder is unreadable, True, as reading its
    journal decides."""
    try:
        return run.liveness() in ("running", "waiting")
    except OSError:
        return True


def _news(journal: JournalFollower) -> list[AnyEvent]:
    """Return the events since the last call. Raises BadInput."""
    try:
        return journal.poll()
    except OSError as error:
        raise BadInput(
            f"{journal.path} cannot be read: {error.strerror}: name another run, or make it "
            "readable"
        ) from error


def _ended(run: RunDir, code: int | None, *, silent: bool) -> int:
    """Return the exit code; if the trainer ended without reporting why, print its last output. A
    trainer that another process started and that reported nothing counts as killed, as only a
    signal ends it so."""
    if silent:
        last = last_words(run) or "nothing was printed"
        said = printable(f"{run.run_id}: the trainer is gone without a word: {last}")
        print(said, file=sys.stderr)
    number = -code if code is not None and code < 0 else signal.SIGKILL
    return 128 + number if code is None or code < 0 else code


def _say(event: AnyEvent) -> None:
    line = event_line(event)
    if line:
        print(printable(line), flush=True)


def event_line(event: AnyEvent) -> str:
    """Return a line for an event that tells how the run is going; "" for others."""
    if isinstance(event, StepFinished):
        left = f"  left {duration_text(event.eta_s)}" if event.eta_s else ""
        return (
            f"step {event.step}/{event.total_steps}  loss {loss_text(event.loss)}  "
            f"{count_text(event.tokens_per_s)} tokens/s{left}"
        )
    if isinstance(event, EvaluationFinished):
        return f"evaluation after step {event.step}: loss {loss_text(event.loss)}"
    if isinstance(event, Failed):
        return f"{'refused' if event.refused else 'failed'}: {event.message}"
    if isinstance(event, Done):
        word = state_of_exit(event.exit_code)
        return f"{word} after step {event.step} in {duration_text(event.seconds)}"
    return ""
