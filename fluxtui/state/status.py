"""Decides the run's status, one word, from its events, its process and the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fluxtrain.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_TERMINATED
from fluxtrain.telemetry.typed import typed_line
from fluxtrain.units import duration_text
from fluxtui.state.freshness import HEARTBEAT_LATE_S
from fluxtui.state.link import Link
from fluxtui.state.run import RunState

Kind = Literal[
    "waiting", "running", "paused", "stalled", "dead", "cut", "failed", "stopped", "finished",
    "unreadable",
]  # fmt: skip
ENDED: frozenset[Kind] = frozenset({"dead", "cut", "failed", "stopped", "finished"})
NO_WAY_ON = "its folder held no run.json to go on with"  # checkpoints may be there all the same


@dataclass(frozen=True, slots=True)
class Status:
    """The status of the run."""

    kind: Kind
    word: str  # for the header: RUNNING, STALLED
    detail: str = ""  # one sentence, "" when the word says it all

    @property
    def ended(self) -> bool:
        return self.kind in ENDED


def status_of(state: RunState, link: Link, now_s: float) -> Status:
    """Return the status of the run at `now_s` (Unix time)."""
    if link.problem is not None:
        return Status("unreadable", "UNREADABLE", link.problem)
    if state.hello is None:
        if link.process == "dead":
            return Status("dead", "DEAD", link.last_words or "it ended before its first event")
        return Status("waiting", "WAITING", "for the trainer's first event")
    ended = _ended(state) or _gone(state, link)
    if ended is not None:
        return ended
    quiet_s = max(now_s - (state.last_wall_s or now_s), link.quiet_s)  # the clock may be set back
    if quiet_s > HEARTBEAT_LATE_S and not link.replay:  # a recording is silent when it waits
        return Status("stalled", "STALLED", f"no sign of life for {duration_text(quiet_s)}")
    phase = state.phase.phase if state.phase else "starting"
    detail = state.phase.detail if state.phase else ""
    if phase == "paused":
        return Status("paused", "PAUSED", detail)
    return Status("running", "RUNNING" if phase == "training" else phase.upper(), detail)


def _gone(state: RunState, link: Link) -> Status | None:
    """Return the status of a run whose events stopped without an end."""
    step = state.step.step if state.step else 0
    if link.over:
        return Status("cut", "CUT OFF", f"the recording ends after step {step}, the run did not")
    if link.process != "dead" or state.hello is None:
        return None
    told = f"process {state.hello.pid} is gone after step {step}"
    if link.last_words:
        told += f": {link.last_words}"
    if state.checkpoint is not None:
        told += f"; --resume auto goes on from step {state.checkpoint.step}"
    return Status("dead", "DEAD", told)


def _ended(state: RunState) -> Status | None:
    """Return the status by the run's own last event, if it ended."""
    if state.failed is not None:
        word = "REFUSED" if state.failed.refused else "FAILED"
        return Status("failed", word, f"{state.failed.kind}: {state.failed.message}")
    if state.done is None:
        return None
    if state.done.exit_code == EXIT_FINISHED:
        return Status("finished", "FINISHED")
    if state.done.exit_code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return Status("stopped", "STOPPED", _way_on(state.done.resume_with))
    return Status("failed", "FAILED", f"exit code {state.done.exit_code}")


def _way_on(command: str | None) -> str:
    return NO_WAY_ON if command is None else typed_line(command)
