"""Earlier runs, as the wizard offers them: to go on with, to watch, and for their models."""

from __future__ import annotations

import time
from pathlib import Path

from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary, list_runs
from fluxtrain.files.atomic import read_json
from fluxtrain.models.model_files import IMAGE_DEMO
from fluxtrain.units import UNKNOWN, duration_text, loss_text
from fluxtui.answers.answers import DEMO
from fluxtui.answers.questions import ListOption
from fluxtui.home import expanded

RESUMABLE = ("stopped", "dead", "failed")
MODELS = 4


def runs_to_resume(runs: list[RunSummary]) -> list[RunSummary]:
    """Return runs that ended before their last step; a refused run has no step to resume from."""
    return [run for run in runs if run.state in RESUMABLE]


def runs_to_watch(runs: list[RunSummary]) -> list[RunSummary]:
    """Return all runs, the running ones first."""
    return sorted(runs, key=lambda run: run.state != "running")


def recent_models(runs: list[RunSummary]) -> list[str]:
    """Return model folders and hub ids of the newest runs, each once, without missing ones and the
    demo."""
    found: list[str] = []
    for run in runs:
        path = _model_path(RunDir(run.path))
        gone = path is None or (path.startswith(("/", "~", ".")) and not _is_there(path))
        if path is not None and path != DEMO and not gone and path not in (IMAGE_DEMO, *found):
            found.append(path)
    return found[:MODELS]


def known_runs(root: Path) -> list[RunSummary]:
    """List all runs below `root`, newest first; none where the folder cannot be read."""
    try:
        return list_runs(root)
    except OSError:
        return []


def run_option(run: RunSummary, now_s: float | None = None) -> ListOption:
    """Describe a run in one line for a list."""
    now_s = time.time() if now_s is None else now_s
    step = UNKNOWN if run.step is None else f"{run.step:,} of {run.total_steps or UNKNOWN}"
    age = duration_text(max(0.0, now_s - run.updated_s))
    return ListOption(run.path, run.run_id, f"{run.word(now_s)}, step {step}, {age} ago")


def run_rows(run: RunSummary) -> tuple[tuple[str, str], ...]:
    """Return name and value of what is known about a run."""
    rows = (
        ("run", run.run_id),
        ("state", f"{run.state}{f': {run.message}' if run.message else ''}"),
        ("model", run.model or ""),
        ("step", "" if run.step is None else f"{run.step:,} of {run.total_steps or UNKNOWN}"),
        ("loss", "" if run.loss is None else loss_text(run.loss)),
    )
    return tuple((name, value) for name, value in rows if value)


def _model_path(run: RunDir) -> str | None:
    try:
        path = (read_json(run.run) or {})["config"]["model"]["path"]
    except (KeyError, TypeError):
        return None
    return path if isinstance(path, str) else None


def _is_there(path: str) -> bool:
    return Path(expanded(path)).is_dir()
