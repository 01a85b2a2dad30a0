"""Finds the run that a user means."""

from __future__ import annotations

import difflib
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs, runs_root

LAST = "last"


def find_run(wanted: str, root: Path | None = None) -> Path:
    """Find the directory of a run named by its id, the beginning of the id, its path, or `last`.

    Raises:
        BadInput: there is no such run; the message has the nearest names.
    """
    root = root or runs_root()
    runs = list_runs(root)
    if wanted == LAST and runs:
        return Path(runs[0].path)
    names = [run.run_id for run in runs]
    matching = [name for name in names if name == wanted] or [
        name for name in names if wanted and name.startswith(wanted)
    ]
    if len(matching) == 1:
        return root / matching[0]
    if len(matching) > 1:
        raise BadInput(f"several runs begin with '{wanted}': {', '.join(matching[:5])}")
    if _is_run(Path(wanted)):
        return Path(wanted).absolute()
    if not names:
        raise BadInput(f"no run '{wanted}': there are no runs in {root}")
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
    raise BadInput(f"no run '{wanted}' in {root}; did you mean {', '.join(near)}?")


def newest_training(root: Path | None = None) -> tuple[Path, str]:
    """Find the newest run that trains; without one the newest of all, with a sentence that says so.

    Raises:
        BadInput: there are no runs.
    """
    runs = list_runs(root or runs_root())
    training = [run for run in runs if run.state in ("running", "waiting")]
    if training:
        return Path(training[0].path), ""
    newest = find_run(LAST, root)
    word = next(run.word() for run in runs if Path(run.path) == newest)
    return newest, f"no run trains now: this is the newest, {newest.name}, {word}"


def _is_run(path: Path) -> bool:
    run = RunDir(path)
    try:
        return any(file.exists() for file in (run.journal, run.run, run.pid))
    except OSError:  # such as a name that no folder can have
        return False
