"""The interface of a tracker, and the facts of a run that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers show it."""

    project: str
    name: str
    folder: Path  # the run directory
    config: Mapping[str, Any] = field(default_factory=dict)  # section.key -> value
    first_step: int = 0  # > 0 after a resume: steps already done
    known_id: str | None = None  # what `start` returned in an earlier process of this run
    offline: bool = False


class Tracker(Protocol):
    """One tracker's run. All calls come from one thread; each may raise, and may take its time."""

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue the one of `run.known_id`; return the id to continue it by."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values after a step."""

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add prompts with their answers after a step."""

    def finish(self, *, failed: bool) -> None:
        """End the run, with everything that was added."""
