"""Tells a run's records and model from files that others put in their place while it trains.

What is there when the process takes the folder is of the run: the start refuses anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from pathlib import Path

from fluxtrain.files.atomic import storage_error
from fluxtrain.files.opening import is_plain_folder, kind_of
from fluxtrain.rundir.own_files import (
    KEPT,
    Identity,
    identity_of,
    kept_beside,
    model_files,
    of_model,
    only_known,
    others_in,
)
from fluxtrain.rundir.run_dir import RunDir

KEPT_MODEL = "kept-from-model"


class Records:
    """The small files of a run that this process writes, and the model that it saves."""

    def __init__(self, run_dir: RunDir, warn: Callable[[str], None]) -> None:
        """Note what is there now as the run's own."""
        self._run_dir, self._warn = run_dir, warn
        files = (run_dir.run, run_dir.plan, run_dir.result, run_dir.error, run_dir.model_list)
        self._known = {path.name: found for path in files if (found := _identity_at(path))}
        self._model = _identities_in(run_dir.model)

    def clear(self, path: Path) -> None:
        """Put aside what others left in the place of a record. Raises as `storage_error`."""
        found = _identity_at(path)
        if found is not None and found != self._known.get(path.name):
            self._keep(path, KEPT, "its own is written there")

    def write_json(self, path: Path, value: object) -> None:
        """Write a record, and put aside what others left in its place. Raises as `clear` and
        `atomic.write_json`."""
        self.clear(path)
        self._run_dir.write_json(path, value)
        self.wrote(path)

    def wrote(self, path: Path) -> None:
        """Note a record that the run has just written."""
        if (found := _identity_at(path)) is not None:
            self._known[path.name] = found

    def forget(self, path: Path) -> None:
        """Remove a record of an earlier process, where there is one."""
        found = _identity_at(path)
        if found is not None and found == self._known.get(path.name):
            path.unlink(missing_ok=True)

    def clear_model(self) -> None:
        """Put aside what is not of the run in its model's folder, which is about to be replaced.
        Raises as `storage_error`."""
        model, why = self._run_dir.model, "its model is saved there"
        if os.path.lexists(model) and not is_plain_folder(model):
            self._keep(model, KEPT_MODEL, why)
        rule = only_known(of_model(model_files(self._run_dir)), self._model)
        for name in others_in(model, rule):
            self._keep(model / name, KEPT_MODEL, why)

    def _keep(self, path: Path, folder: str, why: str) -> None:
        kind = kind_of(path)
        told = f"{path}{f' is {kind} and' if kind else ' is'} not of the run, and {why}"
        try:
            place = kept_beside(path, self._run_dir.path / folder)
        except OSError as error:
            raise storage_error(path, error) from error
        self._warn(f"{told}: it is {place} now")


def _identity_at(path: Path) -> Identity | None:
    try:
        return identity_of(os.lstat(path))
    except OSError:
        return None


def _identities_in(folder: Path) -> Set[Identity]:
    if not is_plain_folder(folder):
        return frozenset()
    return {found for path in folder.rglob("*") if (found := _identity_at(path))}
