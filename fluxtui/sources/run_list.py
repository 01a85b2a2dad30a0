"""The list of runs as it is shown: filtered by words, sorted by a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fluxtrain.events.run_folder.run_dir import RunSummary

Column = Literal["state", "run", "step", "loss", "left", "age", "model"]
FIRST_DOWN: frozenset[Column] = frozenset({"step"})  # whose largest value is looked for first
_KEYS: dict[Column, Callable[[RunSummary, float], Any]] = {
    "state": lambda run, now_s: run.word(now_s),
    "run": lambda run, now_s: run.run_id.lower(),
    "step": lambda run, now_s: run.step,
    "loss": lambda run, now_s: run.loss,
    "left": lambda run, now_s: run.eta_s if run.state == "running" else None,
    "age": lambda run, now_s: now_s - run.updated_s,
    "model": lambda run, now_s: run.model.lower() if run.model else None,
}


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Which runs are shown, and in what order.

    Attributes:
        words: each must occur in a run's state, name, model, method or path; `!word` must not.
        column: sorted by it; None for the newest first.
        down: from the largest to the least.
    """

    words: str = ""
    column: Column | None = None
    down: bool = False

    def by(self, column: Column) -> tuple[Column, bool]:
        """Return column and direction after its key: a second time it is turned round."""
        return column, (not self.down) if column == self.column else column in FIRST_DOWN

    def of(self, runs: Sequence[RunSummary], now_s: float) -> list[RunSummary]:
        """Return the runs to show; what a run does not know comes last, in either direction."""
        shown = [run for run in runs if self._passes(run, now_s)]
        if self.column is None:
            return shown
        key = _KEYS[self.column]
        known = [run for run in shown if key(run, now_s) is not None]
        unknown = [run for run in shown if key(run, now_s) is None]
        return sorted(known, key=lambda run: key(run, now_s), reverse=self.down) + unknown

    def _passes(self, run: RunSummary, now_s: float) -> bool:
        parts = (run.word(now_s), run.run_id, run.model, run.method, run.path, run.message)
        told = " ".join(part for part in parts if part).lower()
        for word in self.words.lower().split():
            if word.startswith("!") and len(word) > 1:
                if word[1:] in told:
                    return False
            elif word not in told:
                return False
        return True
