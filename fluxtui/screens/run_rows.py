"""A run as a line of a list: state, name, step, loss, time left, age, model."""

from __future__ import annotations

from pathlib import Path

from rich.cells import set_cell_size

from fluxtrain.events.run_folder.run_dir import RunSummary
from fluxtrain.units import UNKNOWN, duration_text, loss_text
from fluxtui.panels.panel import time_left_s, whole_text
from fluxtui.state.freshness import SLOWEST_STEP_FACTOR, STEP_FLOOR_S
from fluxtui.widgets.spans import Line, cut_in_front, fitted, wrapped

STATE_ROLES = {
    "running": "good", "finished": "text", "failed": "bad", "stopped": "warn", "dead": "bad",
    "waiting": "dim", "refused": "warn",
}  # fmt: skip
PAST_ALL = ("paused", "stalled")  # of a running run, what somebody should know
OTHER_CELLS = 71
DETAIL_ROWS = 4
FIXED_CELLS = 60
NOTE_CELLS = 5
NAME_CELLS = 21  # of a name given by the trainer: a day, a time, a model
AGE_CELLS, LOSS_CELLS = 9, 10
OTHERS_ALONE_CELLS = 39  # mark, state, step, time left
AGE_FROM_CELLS = 78  # narrower, the age gives way
LOSS_FROM_CELLS = 69  # and then the loss; the detail below tells it


def columns(width: int, sorted_by: str | None = None, down: bool = False) -> Line:
    """Return the names of the columns, with an arrow at the one that sorts the runs."""
    names = {name: name for name in ("state", "run", "step", "loss", "left", "age", "model")}
    if sorted_by in names:
        names[sorted_by] += "↓" if down else "↑"
    loss = f"  {names['loss']:>8}" if width >= LOSS_FROM_CELLS else ""
    age = f"  {names['age']:>7}" if width >= AGE_FROM_CELLS else ""
    text = (
        f"   {names['state']:<12}{names['run']:<{_name_cells(width)}}{names['step']:>13}{loss}"
        f"  {names['left']:>9}{age}{'  ' + names['model'] if _has_note(width) else ''}"
    )
    return fitted(((text, "dim"),), width)


def run_row(run: RunSummary, attached: Path | None, now_s: float, width: int) -> Line:
    """Return the row of a run; the run on screen is marked.

    A long name keeps its end, because names of the same day begin alike.
    """
    here = attached is not None and Path(run.path) == attached
    cells = _name_cells(width)
    name = set_cell_size(cut_in_front(run.run_id, cells - 1), cells)
    step = UNKNOWN if run.step is None else f"{run.step}/{run.total_steps or UNKNOWN}"
    failed = bool(run.message) and STATE_ROLES[run.state] in ("bad", "warn")
    word = run.word(now_s)
    role = "warn" if word in PAST_ALL else STATE_ROLES[run.state]
    note = ((run.message if failed else run.model) or "") if _has_note(width) else ""
    return fitted(
        (
            (" ▸ " if here else "   ", "accent"),
            (f"{word:<12}", role),
            (name, "strong" if here else "text"),
            (f"{step:>13}", "text"),
            *(((f"  {loss_text(run.loss):>8}", "text"),) if width >= LOSS_FROM_CELLS else ()),
            (f"  {left_text(run, now_s):>9}", "text"),
            *(
                ((f"  {_age_text(now_s - run.updated_s):>7}", "dim"),)
                if width >= AGE_FROM_CELLS
                else ()
            ),
            (f"  {note}" if note else "", "bad" if failed else "dim"),
        ),
        width,
    )


def run_detail(run: RunSummary, width: int, keys: tuple[str, str] = ("C", "V")) -> list[Line]:
    """Return details without room in the row: the run's folder, its model and data, its end, and
    the `keys` that chat with its model and evaluate it."""
    loss = f"loss {loss_text(run.loss)}" if width < LOSS_FROM_CELLS and run.loss else ""
    facts = " · ".join(filter(None, (run.model, run.method, loss, run.path)))
    told = [(part, "dim") for part in wrapped(facts, max(1, width - 4))]
    if run.saved_model is not None:
        where = (
            f"the model is in {run.saved_model}; {keys[0]} chats with it, {keys[1]} evaluates it"
        )
        told += [(part, "good") for part in wrapped(where, max(1, width - 4))]
    told += [(part, STATE_ROLES[run.state]) for part in wrapped(run.message, max(1, width - 4))]
    return [(("   ", "text"), span) for span in told[:DETAIL_ROWS]]


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


def _has_note(width: int) -> bool:
    """Return whether the row has room for a word of the model or the message."""
    return width - FIXED_CELLS - NAME_CELLS >= NOTE_CELLS


def _name_cells(width: int) -> int:
    if _has_note(width):
        return max(NAME_CELLS, min(40, width - OTHER_CELLS))
    age = AGE_CELLS if width >= AGE_FROM_CELLS else 0
    loss = LOSS_CELLS if width >= LOSS_FROM_CELLS else 0
    return max(NAME_CELLS, min(40, width - OTHERS_ALONE_CELLS - age - loss))
