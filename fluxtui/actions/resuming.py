"""Whether and how a run goes on, in words."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.rundir.run_dir import RunSummary
from fluxtrain.rundir.states import RunState
from fluxtrain.units import UNKNOWN
from fluxtui.panels.panel import key_of
from fluxtui.sources.trust import question_of_trust
from fluxtui.state.view import View

RESUME = ("--resume", "auto")
STATE_TOLD: dict[RunState, str] = {
    "stopped": "was stopped", "failed": "failed", "dead": "died", "waiting": "waits",
    "running": "runs", "finished": "finished", "refused": "was refused",
}  # fmt: skip


def way_on(run: RunSummary, code: str = "") -> str:
    """Say what resuming a run does, for a person who is asked; `code` is of `trusts_code`."""
    asks = f" {question_of_trust(code)}" if code else ""
    if run.state == "refused":
        return f"It was refused: {run.message}. It is tried again with the same settings.{asks}"
    done = UNKNOWN if run.step is None else f"{run.step:,} of {run.total_steps or UNKNOWN}"
    found = sorted((Path(run.path) / "checkpoints").glob("step-*"))
    newest = found[-1].name.removeprefix("step-").lstrip("0") if found else ""
    whence = f"from its newest checkpoint, step {newest}" if newest else "from its beginning"
    return (
        f"It {STATE_TOLD[run.state]} at step {done}; it goes on {whence}, in a process of its own."
        f"{asks}"
    )


def cannot_resume(run: RunSummary, view: View) -> str:
    """Say why a run cannot be resumed; "" if it can."""
    if run.state == "running":
        return f"{run.run_id} is running: {key_of(view, 'list_choose')} attaches to it"
    if run.state == "finished":
        clone = key_of(view, "clone_run")
        return f"{run.run_id} has finished: {clone} makes a new run with its settings"
    return ""
