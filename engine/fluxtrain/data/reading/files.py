"""Resolves `data.path` to files: a file, a folder, a glob, or a list of these with weights."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fluxtrain.data.containers.opening import READABLE, SUFFIXES, is_about_data, suffix_of
from fluxtrain.data.shapes.convert import KeyRules
from fluxtrain.errors import BadInput

_EVALUATION = ("test", "valid", "validation", "val", "dev", "eval", "heldout", "held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of `data.path`."""

    path: str
    weight: float = 1.0  # how often each row is drawn in an epoch
    configuration: str | None = None  # of a data set on the hub
    split: str | None = None
    rules: KeyRules = field(default_factory=KeyRules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of an entry, and what was left out of its folder."""

    files: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()


def files_of(path: str, key: str = "data.path") -> Found:
    """Return the files that a path, a folder or a glob means, in the order of their names.

    Raises BadInput if there are none, or if a folder holds files for training and for evaluation.
    """
    named = Path(os.path.expanduser(path))
    if named.is_dir():
        return _of_folder(named, key)
    if not named.exists() and glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(str(named), recursive=True))
        files = tuple(match for match in matches if match.is_file())
        if not files:
            raise BadInput(f"{key} {path} matches no file: check the pattern")
        return Found(files=files)
    return Found(files=(named,))


def _of_folder(folder: Path, key: str) -> Found:
    every = sorted(path for path in folder.rglob("*") if path.is_file())
    visible = [path for path in every if not _is_hidden(path.relative_to(folder))]
    files = [path for path in visible if suffix_of(path) in SUFFIXES and not is_about_data(path)]
    left_out = [path for path in visible if path not in set(files)]
    if not files:
        kinds = ", ".join(sorted({path.suffix or path.name for path in left_out})[:8])
        raise BadInput(
            f"{folder} holds no file that can be read ({kinds or 'it is empty'}): put {READABLE} "
            "files in it, each also as .gz or .zst"
        )
    _refuse_splits(folder, files, key)
    return Found(files=tuple(files), left_out=tuple(left_out))


def _refuse_splits(folder: Path, files: Sequence[Path], key: str) -> None:
    """A folder with a file for training and one for tests must not be trained on whole."""
    training = [path for path in files if _names(path, folder, ("train", "training"))]
    testing = [path for path in files if _names(path, folder, _EVALUATION)]
    if training and testing:
        raise BadInput(
            f"{folder} holds data to train on ({training[0].name}) and to evaluate on "
            f"({testing[0].name}): set {key} to the first, as a file or a pattern such as "
            f"'{folder}/train*', and data.held_out_path to the second"
        )


def _names(path: Path, folder: Path, words: Sequence[str]) -> bool:
    parts = path.relative_to(folder).parts
    named = [part.lower().replace("-", ".").replace("_", ".").split(".") for part in parts]
    return any(word in pieces for pieces in named for word in words)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)
