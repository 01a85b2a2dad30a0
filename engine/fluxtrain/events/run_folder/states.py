"""The states of a run and their words: the one table from which lists, screens and logs speak."""

from __future__ import annotations

from typing import Literal

from fluxtrain.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_TERMINATED
from fluxtrain.events.events import RunPhase

RunState = Literal[
    "waiting",  # its folder is there and nothing was written yet
    "running",  # its process is alive
    "finished",  # it made every step and saved its model
    "stopped",  # it ended early, as asked, after a checkpoint
    "failed",  # it ended with an error
    "refused",  # it could not begin: an input cannot be used, or does not fit
    "dead",  # its process is gone without a word
]
HEARTBEAT_LATE_S = 10.0  # the trainer beats once a second, also while a step runs


def state_of_exit(code: int) -> RunState:
    """Return the state of a run that ended in order with an exit code."""
    if code == EXIT_FINISHED:
        return "finished"
    return "stopped" if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) else "failed"


def state_word(state: RunState, phase: RunPhase | None = None, quiet_s: float = 0.0) -> str:
    """Return the word of a state; of a running run its phase, or that it is stalled.

    Args:
        state: of the run.
        phase: the newest that it told.
        quiet_s: seconds since its last sign of life.
    """
    if state != "running":
        return state
    if quiet_s > HEARTBEAT_LATE_S:
        return "stalled"
    return "running" if phase in (None, "training") else phase
