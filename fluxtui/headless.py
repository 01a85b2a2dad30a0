"""Without a terminal: the trainer in the foreground, or a run's progress as lines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fluxtrain.errors import EXIT_BUG, EXIT_FINISHED, EXIT_INTERRUPTED
from fluxtrain.telemetry.events import AnyEvent, Done, EvaluationFinished, Failed, StepFinished
from fluxtrain.telemetry.launch import TRAINER
from fluxtrain.telemetry.reader import JournalFollower
from fluxtrain.telemetry.rundir import RunDir
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
    checkpoint and ends with 130; a second one ends it at once.
    """
    with subprocess.Popen(
        [*command, *arguments], stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            process.send_signal(_FORWARDED[signal.Signals(number)])

        before = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def follow_lines(run_dir: Path) -> int:
    """Print the run's progress until it ends; returns its exit code, or 130 after a Ctrl-C."""
    run, journal = RunDir(run_dir), JournalFollower(RunDir(run_dir).journal)
    try:
        while True:
            alive = run.liveness() in ("running", "new")  # asked first: nothing is missed then
            for event in journal.poll():
                _say(event)
                if isinstance(event, Done | Failed):
                    return event.exit_code
            if not alive:
                print(f"{run.run_id}: the trainer is gone without a word", file=sys.stderr)
                return EXIT_BUG
            time.sleep(POLL_PERIOD_S)
    except KeyboardInterrupt:
        print(f"{run.run_id}: detached; training goes on", file=sys.stderr)
        return EXIT_INTERRUPTED


def _say(event: AnyEvent) -> None:
    line = event_line(event)
    if line:
        print(line, flush=True)


def event_line(event: AnyEvent) -> str:
    """One line for the events that tell how a run is going; "" for the others."""
    if isinstance(event, StepFinished):
        return (
            f"step {event.step}/{event.total_steps}  loss {event.loss:.4f}  "
            f"{event.tokens_per_s:,.0f} tokens/s  left {duration_text(event.eta_s)}"
        )
    if isinstance(event, EvaluationFinished):
        return f"evaluation after step {event.step}: loss {event.loss:.4f}"
    if isinstance(event, Failed):
        return f"failed: {event.message}"
    if isinstance(event, Done):
        word = "finished" if event.exit_code == EXIT_FINISHED else "ended"
        return f"{word} after step {event.step} in {duration_text(event.seconds)}"
    return ""
