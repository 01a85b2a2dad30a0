"""Decides the run's status, one word, from its events, how they came, its process and the clock."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluxtrain.events.run_folder.states import RunState as RunDirState
from fluxtrain.events.run_folder.states import state_of_exit, state_word
from fluxtrain.events.typed import typed_line
from fluxtrain.units import duration_text
from fluxtui.state.run import FoldedRun

Process = Literal["alive", "dead", "unknown"]
Kind = Literal[
    "waiting", "running", "paused", "stalled", "dead", "cut", "failed", "stopped", "finished",
    "unreadable",
]  # fmt: skip
ENDED: frozenset[Kind] = frozenset({"dead", "cut", "failed", "stopped", "finished"})
NO_WAY_ON = "its folder held no run.json to go on with"  # checkpoints may be there all the same


@dataclass(frozen=True, slots=True)
class Link:
    """How the events reach the app."""

    run_dir: Path | None = None
    process: Process = "unknown"
    replay: bool = False  # the run is played back from its journal
    over: bool = False  # the journal that is played back has no more
    live: bool = False  # over the trainer's own pipe, not only the journal
    corrupt_lines: int = 0
    problem: str | None = None  # why the journal cannot be read
    quiet_s: float = 0.0  # since anything came, by a clock that nobody can set
    last_words: str = ""  # of a process that ended without saying so in the journal


@dataclass(frozen=True, slots=True)
class Status:
    """The status of the run."""

    kind: Kind
    word: str  # for the header: RUNNING, STALLED
    detail: str = ""  # one sentence, "" when the word says it all

    @property
    def ended(self) -> bool:
        return self.kind in ENDED


def status_of(state: FoldedRun, link: Link, now_s: float) -> Status:
    """Return the status of the run at `now_s` (Unix time)."""
    if link.problem is not None:
        return Status("unreadable", "UNREADABLE", link.problem)
    if state.hello is None:
        if link.process == "dead":
            return _in_state("dead", link.last_words or "it ended before its first event")
        return _in_state("waiting", f"the trainer starts Python and torch  {link.quiet_s:.0f} s")
    ended = _ended(state, link) or _gone(state, link)
    if ended is not None:
        return ended
    quiet_s = max(now_s - (state.last_wall_s or now_s), link.quiet_s)  # the clock may be set back
    phase = state.phase.phase if state.phase else "starting"
    detail = state.phase.detail if state.phase else ""
    word = state_word("running", phase, 0.0 if link.replay else quiet_s)  # a recording is silent
    if word == "stalled":
        return _in_state("stalled", f"no sign of life for {duration_text(quiet_s)}")
    if word == "paused":
        return _in_state("paused", detail)
    return Status("running", word.upper(), detail)


def _in_state(kind: Kind, detail: str = "") -> Status:
    """Return a status with the same word as the list of runs."""
    return Status(kind, kind.upper(), detail)


def _gone(state: FoldedRun, link: Link) -> Status | None:
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
        told += f"; resume it from step {state.checkpoint.step} in the list of runs"
    return _in_state("dead", told)


def _ended(state: FoldedRun, link: Link) -> Status | None:
    """Return the status by the run's own last event, if it ended."""
    if state.failed is not None:
        word: RunDirState = "refused" if state.failed.refused else "failed"
        return Status("failed", word.upper(), f"{state.failed.kind}: {state.failed.message}")
    if state.done is None:
        return None
    ended = state_of_exit(state.done.exit_code)
    if ended == "finished":
        return _in_state("finished")
    if ended == "stopped":
        return _in_state("stopped", _way_on(state.done.resume_with is not None, link.run_dir))
    return _in_state("failed", f"exit code {state.done.exit_code}")


def _way_on(goes_on: bool, run_dir: Path | None) -> str:
    """Return the command that resumes the run in `run_dir`.

    The journal's own command may be of a run made elsewhere, and users type what they see.
    """
    if not goes_on:
        return NO_WAY_ON
    named = "auto" if run_dir is None else shlex.quote(str(run_dir))
    return typed_line(f"fluxtrain train --resume {named}")
