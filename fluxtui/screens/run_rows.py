"""The list of runs: filtered by words, sorted by a column, and each run as a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.cells import set_cell_size

from fluxtrain.events.run_folder.run_dir import RunSummary
from fluxtrain.units import UNKNOWN, count_text, duration_text, loss_text
from fluxtui.panels.panel import time_left_s, whole_text
from fluxtui.state.freshness import SLOWEST_STEP_FACTOR, STEP_FLOOR_S
from fluxtui.widgets.spans import Line, cut_in_front, fitted, wrapped

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
        """Return the order after a column's key; the second press reverses it."""
        return column, (not self.down) if column == self.column else column in FIRST_DOWN

    def of(self, runs: Sequence[RunSummary], now_s: float) -> list[RunSummary]:
        """Return the runs to show; runs without a value come last, in either direction."""
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


STATE_ROLES = {
    "running": "good", "finished": "info", "failed": "bad", "stopped": "warn", "dead": "bad",
    "waiting": "dim", "refused": "warn",
}  # fmt: skip
PAST_ALL = ("paused", "stalled")  # of a running run, what somebody should know
DETAIL_ROWS = 4
STATE_CELLS = 15  # with the mark in front
NAME_CELLS, MOST_NAME_CELLS = 21, 40  # of a name given by the trainer: a day, a time, a model
NOTE_CELLS = 7  # the least that the model or a message has


@dataclass(frozen=True)
class RunColumn:
    """A column of the list, as far as there is room: the first ones come first."""

    name: str
    cells: int  # with two in front
    text: Callable[[RunSummary, float], str]  # of a run at a Unix time
    role: str = "text"


def left_text(run: RunSummary, now_s: float) -> str:
    """Return the time a running run still needs, by its newest step; "-" for all others, and for a
    run whose next steps are overdue: it is paused, or stuck.
    """
    limit_s = max(STEP_FLOOR_S, SLOWEST_STEP_FACTOR * (run.step_s or 0.0))
    if run.state != "running" or run.eta_s is None or now_s - run.stepped_s > limit_s:
        return UNKNOWN
    steps_left = (run.total_steps or 0) - (run.step or 0)
    return whole_text(time_left_s(run.eta_s, max(0.0, now_s - run.stepped_s), steps_left))


def _age_text(seconds: float) -> str:
    return duration_text(max(0.0, seconds)) if seconds >= 1.0 else "now"


def _step_text(run: RunSummary) -> str:
    return UNKNOWN if run.step is None else f"{run.step}/{run.total_steps or UNKNOWN}"


def _took_s(run: RunSummary, now_s: float) -> float | None:
    """Return the seconds of the last process; of a running one, so far."""
    if run.state != "running":
        return run.seconds
    return max(0.0, now_s - run.started_s)


COLUMNS = (
    RunColumn("step", 13, lambda run, _: _step_text(run)),
    RunColumn("left", 11, left_text),
    RunColumn("loss", 10, lambda run, _: loss_text(run.loss)),
    RunColumn("eval", 10, lambda run, _: loss_text(run.evaluation_loss)),
    RunColumn("age", 9, lambda run, now_s: _age_text(now_s - run.updated_s), "dim"),
    RunColumn("method", 8, lambda run, _: run.method or UNKNOWN),
    RunColumn("tok/s", 9, lambda run, _: count_text(run.tokens_per_s)),
    RunColumn("took", 9, lambda run, now_s: duration_text(_took_s(run, now_s)), "dim"),
)
IN_ORDER = ("step", "loss", "eval", "tok/s", "left", "took", "age", "method")


def columns(width: int, sorted_by: str | None = None, down: bool = False) -> Line:
    """Return the names of the columns, with an arrow at the one that sorts the runs."""

    def named(name: str) -> str:
        return name + ("↓" if down else "↑") * (name == sorted_by)

    shown, name_cells, note_cells = _shares(width)
    text = f"   {named('state'):<12}{named('run'):<{name_cells}}"
    text += "".join(f"{named(one.name):>{one.cells}}" for one in shown)
    return fitted(((text + f"  {named('model')}" * (note_cells > 0), "dim"),), width)


def run_row(run: RunSummary, attached: Path | None, now_s: float, width: int) -> Line:
    """Return the row of a run; the run on screen is marked.

    A long name keeps its end, because names of the same day begin alike.
    """
    here = attached is not None and Path(run.path) == attached
    shown, name_cells, note_cells = _shares(width)
    name = set_cell_size(cut_in_front(run.run_id, name_cells - 1), name_cells)
    failed = bool(run.message) and STATE_ROLES[run.state] in ("bad", "warn")
    word = run.word(now_s)
    role = "warn" if word in PAST_ALL else STATE_ROLES[run.state]
    note = (run.message if failed else run.model) or ""
    return fitted(
        (
            (" ▸ " if here else "   ", "accent"),
            (f"{word:<12}", role),
            (name, "strong" if here else "text"),
            *((f"{one.text(run, now_s):>{one.cells}}", one.role) for one in shown),
            (f"  {note}" if note and note_cells else "", "bad" if failed else "dim"),
        ),
        width,
    )


def _shares(width: int) -> tuple[list[RunColumn], int, int]:
    """Return the columns that have room, and the cells of the name and of the note."""
    room, shown = width - STATE_CELLS - NAME_CELLS, list[RunColumn]()
    for column in COLUMNS:
        if column.cells > room:
            break
        shown.append(column)
        room -= column.cells
    note = room if len(shown) == len(COLUMNS) and room >= NOTE_CELLS else 0
    spare = room - NOTE_CELLS * 3 if note else room
    wider = max(0, min(MOST_NAME_CELLS - NAME_CELLS, spare))
    shown.sort(key=lambda one: IN_ORDER.index(one.name))
    return shown, NAME_CELLS + wider, note and note - wider


def run_detail(run: RunSummary, width: int, uses: str = "") -> list[Line]:
    """Return details that do not fit into the row: the run's folder, its model and data, its end,
    and the `uses` of its model or newest checkpoint."""
    has_loss = any(one.name == "loss" for one in _shares(width)[0])
    loss = f"loss {loss_text(run.loss)}" if run.loss and not has_loss else ""
    facts = " · ".join(filter(None, (run.model, run.method, loss, run.path)))
    told = [(part, "dim") for part in wrapped(facts, max(1, width - 4))]
    where = f"the model is in {run.saved_model}" if run.saved_model else ""
    if not where and run.checkpoint_step is not None:
        where = f"its newest checkpoint is of step {run.checkpoint_step}"
    if where:
        told += [(part, "good") for part in wrapped(f"{where}; {uses}", max(1, width - 4))]
    told += [(part, STATE_ROLES[run.state]) for part in wrapped(run.message, max(1, width - 4))]
    return [(("   ", "text"), span) for span in told[:DETAIL_ROWS]]
