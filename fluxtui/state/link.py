"""The way in which a run's events reach the app, and the facts about its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Process = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way in which the events reach the app."""

    run_dir: Path | None = None
    process: Process = "unknown"
    replay: bool = False  # the run is played back from its journal
    over: bool = False  # the journal that is played back has no more
    live: bool = False  # over the trainer's own pipe, not only the journal
    corrupt_lines: int = 0
    problem: str | None = None  # why the journal cannot be read
    quiet_s: float = 0.0  # since anything came, by a clock that nobody can set
    last_words: str = ""  # of a process that ended without saying so in the journal
