"""Deletes a run: only files that a run writes, only below the runs folder, never one in use."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.events.printable import printable
from fluxtrain.events.run_folder.own_files import (
    SAMPLES,
    Rule,
    Visited,
    model_files,
    of_checkpoints,
    of_model,
    of_samples,
    of_trackers,
    of_unfinished_model,
    open_folder,
    visit,
)
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.opening import open_plain

_HERE = RunDir(".")
# Files that a run writes, and `fluxtrain trace` by default.
OWN = frozenset(
    path.name
    for path in (
        _HERE.run, _HERE.plan, _HERE.journal, _HERE.timeline, _HERE.log, _HERE.result, _HERE.error,
        _HERE.pid, _HERE.model_list, _HERE.path / "trace.json.gz",
    )
)  # fmt: skip
CONFIG_NAME = "config.yaml"  # the wizard's file beside them, and how it begins
CONFIG_MARK = "# Written by fluxtrain-tui for the run in this folder, and deleted with it.\n"
_CUT_OFF = re.compile(r"\.(?P<name>.+)\.\d+\.tmp")  # by a trainer that was killed


@dataclass(frozen=True)
class Contents:
    """The content of a run's folder, in the order of names."""

    own_bytes: int  # what deleting the run frees
    others: tuple[str, ...] = ()  # paths in it that stay

    @property
    def kept_text(self) -> str:
        """Name the files that stay; empty if none does."""
        if not self.others:
            return ""
        more = f" and {len(self.others) - 1} more" if len(self.others) > 1 else ""
        stay = "stay: not" if more else "stays: not"
        return f"{printable(self.others[0])}{more} {stay} of the run"


def contents(run_dir: Path) -> Contents:
    """Return a folder's content; none if it cannot be read or is a link."""
    try:
        folder = open_folder(run_dir)
    except OSError:
        return Contents(0)
    try:
        return _told(visit(folder, _rule_of(folder)))
    except OSError:
        return Contents(0)
    finally:
        os.close(folder)


def _told(found: Visited) -> Contents:
    return Contents(found.own_bytes, tuple(found.others))


def _place(folder: int) -> Path:
    """Return a path that leads to the folder of a handle, whatever became of its name."""
    return Path(f"/proc/self/fd/{folder}")


def _rule_of(folder: int) -> Rule:
    """Return the rule of the run in the folder of a handle, with its own list of saved files."""
    listed = model_files(RunDir(_place(folder)))

    def rule(name: str, facts: os.stat_result) -> Rule | bool:
        if stat.S_ISDIR(facts.st_mode):
            return _rule_of_folder(name, listed)
        if name == _HERE.socket.name:
            return stat.S_ISSOCK(facts.st_mode)
        if not stat.S_ISREG(facts.st_mode):
            return False
        if name == CONFIG_NAME:
            return _is_of_the_wizard(_place(folder) / name)
        cut_off = _CUT_OFF.fullmatch(name)
        return name in OWN or (cut_off is not None and cut_off["name"] in OWN)

    return rule


def _rule_of_folder(name: str, listed: Mapping[str, int] | None) -> Rule | bool:
    if name == _HERE.checkpoints.name:
        return of_checkpoints
    if name == _HERE.model.name:
        return of_model(listed)
    if name in ("trackers", "tensorboard"):
        return of_trackers
    if name == SAMPLES:
        return of_samples
    return of_unfinished_model(name, listed)


def _is_of_the_wizard(path: Path) -> bool:
    mark = CONFIG_MARK.encode()
    try:
        with open_plain(path) as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


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


def remove_run(run_dir: Path, root: Path) -> Contents:
    """Delete a run with its checkpoints and its model; returns what that freed and what stayed. Its
    folder goes too, unless something else is in it.

    The run's lock is held meanwhile, so no trainer can begin to use what is being deleted. Links
    inside stay, as a run writes none.

    Raises:
        BadInput: it must not be deleted, or cannot be.
    """
    check_removable(run_dir, root)
    with _held(run_dir, root) as (runs, folder):
        before = visit(folder, _rule_of(folder)).own_bytes
        try:
            with _locked(run_dir, folder):
                found = _told(visit(folder, _rule_of(folder), remove=True))
            if not found.others and _is_still(run_dir.name, runs, folder):
                os.rmdir(run_dir.name, dir_fd=runs)
        except OSError as error:
            reason = error.strerror or str(error)
            where = error.filename if isinstance(error.filename, str) else ""
            raise BadInput(
                f"{where or run_dir} cannot be deleted: {reason}; the rest of the run is still "
                "there"
            ) from error
        return Contents(before, found.others)


@contextmanager
def _held(run_dir: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Hold handles of the runs folder and the run's; the names may lead elsewhere from now on."""
    handles: list[int] = []
    try:
        handles.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        handles.append(open_folder(run_dir.name, handles[0]))
    except OSError as error:
        for handle in handles:
            os.close(handle)
        raise BadInput(f"{run_dir} cannot be deleted: {error.strerror}") from error
    try:
        yield handles[0], handles[1]
    finally:
        for handle in handles:
            os.close(handle)


@contextmanager
def _locked(run_dir: Path, folder: int) -> Iterator[None]:
    """Hold the lock of the run in the folder of a handle. Raises BadInput where it is in use."""
    held = RunDir(_place(folder))
    try:
        lock = held.lock(space_bytes=0)  # it frees some
    except BadInput as error:
        raise BadInput(str(error).replace(str(held.path), str(run_dir))) from error
    with lock:
        yield


def _is_still(name: str, runs: int, folder: int) -> bool:
    """Return whether a name in the runs folder still leads to the folder of a handle."""
    there = os.stat(name, dir_fd=runs, follow_symlinks=False)
    return os.path.samestat(there, os.fstat(folder))
