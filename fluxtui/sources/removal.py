"""Deletes a run: only files that a run writes, only below the runs folder, never one in use."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.plain_files import open_plain
from fluxtrain.rundir.run_dir import RunDir
from fluxtrain.telemetry.printable import printable

_HERE = RunDir(".")
# Files that a run writes, and `fluxtrain trace` by default.
OWN = frozenset(
    path.name
    for path in (
        _HERE.run, _HERE.plan, _HERE.journal, _HERE.timeline, _HERE.log, _HERE.result, _HERE.error,
        _HERE.pid, _HERE.socket, _HERE.checkpoints, _HERE.model, _HERE.path / "trace.json.gz",
    )
)  # fmt: skip
OWN_CHECKPOINTS = ("step-", ".writing-")  # how names begin among a run's checkpoints
CONFIG_NAME = "config.yaml"  # the wizard's file beside them, and how it begins
CONFIG_MARK = "# Written by fluxtrain-tui for the run in this folder, and deleted with it.\n"


@dataclass(frozen=True)
class Contents:
    """The content of a run's folder, in the order of names."""

    run_dir: Path
    own: tuple[Path, ...]
    others: tuple[Path, ...]  # they stay

    @property
    def own_bytes(self) -> int:
        """Return the bytes that deleting the run frees."""
        return sum(size_bytes(path) for path in self.own)

    @property
    def kept_text(self) -> str:
        """Say what stays; empty if nothing does."""
        if not self.others:
            return ""
        more = f" and {len(self.others) - 1} more" if len(self.others) > 1 else ""
        stay = "stay: not" if more else "stays: not"
        first = printable(str(self.others[0].relative_to(self.run_dir)))
        return f"{first}{more} {stay} of the run"


def contents(run_dir: Path) -> Contents:
    """Return a folder's content; none if it cannot be read. If its checkpoints folder holds other
    files too, list each entry of that folder."""
    run = RunDir(run_dir)
    found, checkpoints = _within(run.path), run.checkpoints
    beside = [] if checkpoints.is_symlink() else _within(checkpoints)
    if not all(path.name.startswith(OWN_CHECKPOINTS) for path in beside):
        found = sorted({*found, *beside} - {checkpoints})
    own = tuple(path for path in found if _is_own(path, run.path))
    return Contents(run.path, own, tuple(path for path in found if path not in own))


def _within(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_own(path: Path, run_dir: Path) -> bool:
    """Return whether a run wrote the file, also one cut off when the trainer was killed."""
    name = path.name
    if path.parent != run_dir:
        return name.startswith(OWN_CHECKPOINTS)
    if name == CONFIG_NAME:
        return _is_of_the_wizard(path)
    return name in OWN or any(name.startswith((f".{own}.", f".{own}-")) for own in OWN)


def _is_of_the_wizard(path: Path) -> bool:
    mark = CONFIG_MARK.encode()
    try:
        with open_plain(path) as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


def size_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; a link counts as itself, not as its
    target."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if os.path.lexists(path) else 0
    total = 0
    for parent, _, names in os.walk(path, followlinks=False):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # gone meanwhile
    return total


def check_removable(run_dir: Path, root: Path) -> None:
    """Raise `BadInput` with the reason if a run must not be deleted."""
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
    """Delete a run with its checkpoints and its model; returns the bytes that this freed. Its
    folder goes too, unless something else is in it.

    The run's lock is held meanwhile, so no trainer can begin to use what is being deleted. Links
    inside are removed as links.

    Raises:
        BadInput: it must not be deleted, or cannot be.
    """
    check_removable(run_dir, root)
    freed_bytes = contents(run_dir).own_bytes
    with RunDir(run_dir).lock():
        found = contents(run_dir)
        try:
            for path in found.own:
                _remove(path)
            if not found.others:
                run_dir.rmdir()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise BadInput(
                f"{error.filename or run_dir} cannot be deleted: {reason}; the rest of the run is "
                "still there"
            ) from error
    return freed_bytes


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
