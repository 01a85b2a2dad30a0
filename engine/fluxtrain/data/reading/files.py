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
from fluxtrain.files.opening import leaves

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
class FoundFiles:
    """The files of an entry, and what was left out of its folder."""

    files: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()


def files_of(path: str, key: str = "data.path") -> FoundFiles:
    """Return the files that a path, a folder or a glob means, in the order of their names.

    The path itself may be a link. Links that a folder or a glob has must stay inside, or lead to
    the blobs of the hub's cache; a file that several of them reach is taken once. Raises BadInput
    for other links, if there are no files, or if a folder holds files for training and for
    evaluation.
    """
    named = Path(os.path.expanduser(path))
    try:
        if named.is_dir():
            return _of_folder(named, key)
        if not named.exists() and glob.has_magic(path):
            matches = sorted(Path(match) for match in glob.glob(str(named), recursive=True))
            _refuse_leaving(matches, _root_of(str(named)), key)
            files, left_out = _once([match for match in matches if not match.is_dir()])
            if not files:
                raise BadInput(f"{key} {path} matches no file: check the pattern")
            odd = {os.path.realpath(path): path for path in reversed(left_out)}
            kept = [path for real, path in odd.items() if not os.path.isfile(real)]
            return FoundFiles(files=tuple(files), left_out=tuple(sorted(kept)))
    except OSError as error:
        where = error.filename or path
        raise BadInput(f"{key} {where:.200} cannot be read: {error.strerror}") from error
    return FoundFiles(files=(named,))


def _of_folder(folder: Path, key: str) -> FoundFiles:
    visible = _visible(folder, key)
    data = [path for path in visible if suffix_of(path) in SUFFIXES and not is_about_data(path)]
    files, _ = _once([path for path in data if not _is_private(path.relative_to(folder))])
    taken, named = set(files), set(data)
    told = [path for path in visible if path in named or not _is_private(path.relative_to(folder))]
    left_out = [path for path in told if path not in taken]
    if not files:
        kinds = ", ".join(sorted({path.suffix or path.name for path in left_out})[:8])
        raise BadInput(
            f"{folder} holds no file that can be read ({kinds or 'it is empty'}): put {READABLE} "
            "files in it, each also as .gz or .zst"
        )
    _refuse_splits(folder, files, key)
    return FoundFiles(files=tuple(files), left_out=tuple(left_out))


def _refuse_splits(folder: Path, files: Sequence[Path], key: str) -> None:
    """Refuse a folder with a file for training and one for tests, which must not be trained on
    whole."""
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


def _root_of(pattern: str) -> Path:
    """Return the folder that a glob begins in: the path before its first magic part."""
    parts = Path(pattern).parts
    magic = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:magic])


def _refuse_leaving(paths: Sequence[Path], folder: Path, key: str) -> None:
    """Raise BadInput for a path that leads out of its folder to a file that the user
    did not name."""
    for path in paths:
        real = leaves(path, folder)
        if real is not None and real.exists():
            raise BadInput(
                f"{path} leads to {real}, outside of {folder}: name that itself in {key}, which "
                "may be a list, or put a copy in the place of the link"
            )


def _visible(folder: Path, key: str) -> list[Path]:
    """Return all paths that are no folders, at any depth, except names that begin with a dot."""
    found: list[Path] = []
    seen: set[str] = set()  # folders, so that links to one above end
    for here, inner, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        files = [Path(here, name) for name in names if not name.startswith(".")]
        links = [Path(here, name) for name in inner if os.path.islink(Path(here, name))]
        _refuse_leaving([*links, *(path for path in files if path.is_symlink())], folder, key)
        found += files
    return sorted(found)


def _once(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Divide paths into files, each once, and the rest: links that lead nowhere, pipes, repeats."""
    seen: set[str] = set()
    files: list[Path] = []
    rest: list[Path] = []
    for path in paths:
        real = os.path.realpath(path)
        (files if os.path.isfile(real) and real not in seen else rest).append(path)
        seen.add(real)
    return files, rest


def _refuse(error: OSError) -> None:
    raise error


def _is_private(relative: Path) -> bool:
    return any(part.startswith("_") for part in relative.parts)
