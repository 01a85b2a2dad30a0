"""Deleting a run: only a run, only below the runs folder, never one that is in use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.telemetry.rundir import RunDir


def size_bytes(folder: Path) -> int:
    """Bytes of the files in `folder`; a link counts as itself, never as what it points to."""
    total = 0
    for parent, _, names in os.walk(folder, followlinks=False):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # gone meanwhile
    return total


def check_removable(run_dir: Path, root: Path) -> None:
    """Raise `BadInput` with the reason where a run must not be deleted."""
    if run_dir.is_symlink():
        raise BadInput(f"{run_dir} is a link: delete the run where it really lies")
    if not run_dir.is_dir():
        raise BadInput(f"{run_dir} is not there any more")
    if run_dir.parent.resolve() != root.resolve() or run_dir.name in ("", ".", ".."):
        raise BadInput(f"{run_dir} is not in {root}: only runs of this folder are deleted")
    run = RunDir(run_dir)
    if not any(path.exists() for path in (run.journal, run.run, run.pid)):
        raise BadInput(f"{run_dir} holds no run")
    if run.liveness() == "running":
        raise BadInput(f"{run.run_id} is running: stop it first")


def remove_run(run_dir: Path, root: Path) -> int:
    """Delete a run with its checkpoints and its model; returns the bytes that this freed.

    The run's lock is held meanwhile, so no trainer can begin to use what is being deleted. Links
    inside are removed as links.

    Raises:
        BadInput: it must not be deleted, or cannot be.
    """
    check_removable(run_dir, root)
    freed_bytes = size_bytes(run_dir)
    with RunDir(run_dir).lock():
        try:
            shutil.rmtree(run_dir)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise BadInput(
                f"{error.filename or run_dir} cannot be deleted: {reason}; the rest of the run is "
                "still there"
            ) from error
    return freed_bytes
