"""Refuse paths that are not there, or hold no model or data, as soon as a configuration is read:
before a hub is asked, and before anything is imported that takes seconds. Standard library only."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from fluxtrain.config.data_settings import DataEntry, DataPath
from fluxtrain.config.schema import RunConfig
from fluxtrain.data.reading.files import files_of
from fluxtrain.errors import BadInput, brief
from fluxtrain.models.model_files import IMAGE_DEMO, is_local, is_pipeline, model_config

DEMO = "demo"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)


def refuse_missing_paths(config: RunConfig) -> None:
    """Raise BadInput that names every path of `config` that does not exist, with the nearest; else
    as reading them does: for a folder without config.json, a pattern that matches no file."""
    missing = list(_missing(config))
    if missing:
        raise BadInput("; ".join(missing))
    model = config.model.path
    if model != DEMO:
        if is_pipeline(model) or not _exists(model):
            return
        model_config(Path(model).expanduser())
    for key, address in _local_data(config):
        files_of(address, key)


def _missing(config: RunConfig) -> Iterator[str]:
    model = config.model.path
    if model != DEMO and is_local(model) and not _exists(model):
        yield _told(model, "model.path")
    for key, address in _local_data(config):
        if not _exists(address) and not glob.has_magic(address):
            yield _told(address, key)
    if isinstance(config.samples.prompts, str) and not _exists(config.samples.prompts):
        yield _told(config.samples.prompts, "samples.prompts")


def _local_data(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield every path on this machine that the data is read from, with its setting."""
    data = config.data
    for key, path in (("data.path", data.path), ("data.held_out_path", data.held_out_path)):
        for address in addresses(path):
            made = address in (DEMO, IMAGE_DEMO) and key == "data.path"
            if not made and not is_address(address):
                yield key, address


def is_address(path: str) -> bool:
    """Return whether a path of data is one on the hub, not on this machine."""
    return _ADDRESS.match(path) is not None


def addresses(path: DataPath | None) -> Iterator[str]:
    """Yield every path that a setting of data names."""
    for one in (path,) if isinstance(path, str) else path or ():
        yield one.path if isinstance(one, DataEntry) else one


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, an unknown user
        return False


def _told(path: str, key: str) -> str:
    """Say that a path is missing, where it was looked for, and which one is near."""
    near = _nearest(path)
    here = "" if os.path.isabs(os.path.expanduser(path)) else f" in {os.getcwd()}"
    meant = f", or did you mean {brief(near)}?" if near else ""
    return f"{brief(path)} does not exist{here}: check {key}{meant}"


def _nearest(path: str) -> str | None:
    """Return the path whose last existing folder has an entry of nearly the missing name."""
    try:
        whole = Path(path).expanduser()
        parent = next(folder for folder in whole.parents if folder.is_dir())
        wanted = whole.relative_to(parent).parts[0]
        names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    except (OSError, ValueError, RuntimeError, StopIteration):
        return None
    near = get_close_matches(wanted, names, n=1, cutoff=0.7)
    return str(parent / near[0] / Path(*whole.relative_to(parent).parts[1:])) if near else None
