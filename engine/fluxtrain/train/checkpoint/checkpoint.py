"""Checkpoints: a folder that is whole or absent, whose every byte is hashed.

    checkpoints/step-00000120/  manifest.json  trainer.json  shard-00000.safetensors ...

A checkpoint is written next to its final name and renamed when everything is on disk, so a kill
or a full disk never harms the one before. Some shards are written, and read, at once, from the
engine's own memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

import fluxtrain
from fluxtrain.errors import TooNew
from fluxtrain.events.run_folder.own_files import of_checkpoint, open_folder, visit
from fluxtrain.files.at_once import several_at_once
from fluxtrain.files.atomic import storage_error, sync
from fluxtrain.files.cache import Damaged
from fluxtrain.files.opening import is_plain_folder, kind_of, open_plain, read_again, read_plain
from fluxtrain.files.temporary import FULL
from fluxtrain.train.checkpoint.shard_file import (
    WrittenFile,
    hash_file,
    read_tensors,
    write_json,
    write_tensors,
)

FORMAT = 1
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
_TEMPORARY = ".writing-"
_SEAL = "sha256"
_STEP_NAME = re.compile(r"step-\d{8,}")  # and no copy with a name like it


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read: every file it names and their sum."""

    path: Path
    step: int
    bytes: int
    shards: tuple[tuple[str, str], ...]  # (the engine's name, the file's name)
    named: bool = False  # by the user: no other one takes its place

    def trainer_state(self) -> dict[str, Any]:
        """Read the state that the trainer saves with the engine's shards. Raises Damaged."""
        try:
            state: dict[str, Any] = json.loads(read_plain(self.path / TRAINER))
        except (OSError, ValueError) as error:
            raise Damaged(f"{self.path.name}: {TRAINER} cannot be read ({error})") from None
        return state

    def load_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield one shard at a time, mapped from its file. Raises Damaged."""
        for name, file_name in self.shards:
            try:
                tensors = read_tensors(self.path / file_name)
            except (SafetensorError, OSError) as error:
                raise Damaged(f"{self.path.name}: {error}") from error
            yield name, tensors


_FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # no other folder
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Facts(msgspec.Struct):
    bytes: _Count
    sha256: str


class _Manifest(msgspec.Struct):
    """The content of manifest.json, without its seal."""

    format: int
    step: _Count
    shards: list[tuple[str, _FileName]]
    files: dict[_FileName, _Facts]


def step_folder(root: Path, step: int) -> Path:
    """Return the name of a step's checkpoint; names sort by step."""
    return root / f"step-{step:08d}"


def write_checkpoint(
    root: Path,
    step: int,
    shards: Iterable[tuple[str, dict[str, Tensor]]],
    trainer_state: dict[str, Any],
    written: Callable[[dict[str, Tensor]], None] = lambda _: None,
) -> Checkpoint:
    """Write the checkpoint of `step` under `root`; it gets its name only once it is complete.

    `written` is called with the tensors of each shard once they are on disk, on any thread.

    Raises:
        NoSpace: the disk is full; earlier checkpoints are untouched, nothing partial is left.
        OSError: the folder cannot be written, or files of the checkpoint were removed meanwhile.
    """
    final = step_folder(root, step)
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        root.mkdir(exist_ok=True)
        remove_unfinished(root)
        temporary.mkdir()
        files = _write_files(temporary, step, shards, trainer_state, written)
        _refuse_taken_away(temporary, files["files"])
        sync(temporary)
        if is_plain_folder(final):  # only a damaged checkpoint of the step is written again
            _remove_own(final)
        elif os.path.lexists(final):
            _keep(final)
        temporary.rename(final)
        sync(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in FULL:
            raise storage_error(root, error) from error
        raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return _described(final, step, files)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check every byte of a checkpoint folder against its manifest.

    Raises:
        Damaged: a file is missing, short or altered; the message says which.
    """
    if not is_plain_folder(path):
        raise Damaged(f"{path.name} is {kind_of(path) or 'a file'}, and no checkpoint's folder")
    manifest = _manifest(path)
    files = {name: WrittenFile(f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
    for name, expected in files.items():
        try:
            found_bytes = _size_bytes(path / name)
        except FileNotFoundError:
            raise Damaged(f"{path.name}: {name} is missing") from None
        except OSError as error:
            raise Damaged(f"{path.name}: {name} cannot be read: {error.strerror}") from None
        if found_bytes != expected.bytes:
            raise Damaged(
                f"{path.name}: {name} has {found_bytes:,} bytes instead of {expected.bytes:,}"
            )

    def check(_: int, name: str) -> None:
        try:
            found = read_again(partial(hash_file, path / name), path / name)
        except OSError as error:
            raise Damaged(f"{path.name}: {name} cannot be read: {error}") from None
        if found != files[name]:
            raise Damaged(f"{path.name}: {name} is not what was written (sha256 differs)")

    several_at_once(check, files)
    return _described(path, manifest["step"], {**manifest, "files": files})


def list_checkpoints(root: Path) -> list[Path]:
    """List folders with the name of a checkpoint, the newest step first, unchecked."""
    if not is_plain_folder(root):
        return []
    named = (path for path in root.glob("step-*") if _STEP_NAME.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), reverse=True)


def _size_bytes(path: Path) -> int:
    """Return the size of a regular file. Raises OSError for anything else, also for a link."""
    with open_plain(path) as file:
        return os.fstat(file.fileno()).st_size


def prune(root: Path, keep: int, step: int, best_step: int | None = None) -> None:
    """Remove all but the `keep` newest checkpoints up to `step`.

    The one of `best_step` replaces the oldest of them, where two or more are kept. Later ones
    stay, because a run that continued from an earlier checkpoint would lose them.
    """
    past = [path for path in list_checkpoints(root) if path.name <= step_folder(root, step).name]
    kept = past[:keep]
    if best_step is not None and keep > 1:
        best = step_folder(root, best_step)
        kept = kept if best in kept or best not in past else [*past[: keep - 1], best]
    for path in past:
        if path not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, which may be gone already. It is renamed first, so that a kill leaves
    no half of it under its name."""
    doomed = path.with_name(f"{_TEMPORARY}old-{path.name}")
    with suppress(FileNotFoundError):
        path.rename(doomed)
        _remove_own(doomed)


def _remove_own(path: Path) -> None:
    """Remove what a run wrote into a checkpoint's folder; where something else is in it, the folder
    stays under another name."""
    try:
        folder = open_folder(path)
    except OSError:
        return
    try:
        others = visit(folder, of_checkpoint, remove=True).others
    except OSError:
        return  # tried again when the next checkpoint is written
    finally:
        os.close(folder)
    if not others:
        path.rmdir()
        return
    _keep(path)


def _keep(path: Path) -> None:
    """Rename foreign files in the place of a checkpoint, or in it, to a name that no run uses."""
    name = f"kept-from-{path.name.removeprefix(_TEMPORARY).removeprefix('old-')}"
    taken = (path.with_name(f"{name}-{number}" if number else name) for number in range(1000))
    path.rename(next(place for place in taken if not os.path.lexists(place)))


def remove_unfinished(root: Path) -> None:
    """Remove the files that a process left when it was killed while writing or pruning."""
    if not is_plain_folder(root):
        return
    for path in root.glob(f"{_TEMPORARY}*"):
        if path.is_symlink():
            path.unlink()
        else:
            _remove_own(path)


def _write_files(
    folder: Path,
    step: int,
    shards: Iterable[tuple[str, dict[str, Tensor]]],
    trainer_state: dict[str, Any],
    written: Callable[[dict[str, Tensor]], None],
) -> dict[str, Any]:
    def write(number: int, shard: tuple[str, dict[str, Tensor]]) -> tuple[str, str, WrittenFile]:
        name, tensors = shard
        file_name = f"shard-{number:05d}.safetensors"
        file = write_tensors(folder / file_name, tensors)
        written(tensors)
        return name, file_name, file

    made = several_at_once(write, shards)
    names = [[name, file_name] for name, file_name, _ in made]
    files = {file_name: file for _, file_name, file in made}
    files[TRAINER] = write_json(folder / TRAINER, trainer_state)
    manifest = {"format": FORMAT, "step": step, "shards": names}
    listed = {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in files.items()}
    content = {**manifest, "files": listed, "written_by": fluxtrain.__version__}
    write_json(folder / MANIFEST, {**content, _SEAL: _seal(content)})
    return {**manifest, "files": files}


def _refuse_taken_away(folder: Path, files: dict[str, WrittenFile]) -> None:
    """Raise OSError where somebody removed or shortened a file that was just written, or put a
    link in the place of the folder of all checkpoints."""
    if not is_plain_folder(folder.parent):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder any more", os.fspath(folder.parent))
    for name in (MANIFEST, *files):
        size = os.lstat(folder / name).st_size
        if name in files and size != files[name].bytes:
            told = f"has {size:,} bytes instead of {files[name].bytes:,}"
            raise OSError(errno.ESTALE, told, os.fspath(folder / name))


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(read_plain(path / MANIFEST))
    except (OSError, ValueError, RecursionError):
        raise Damaged(f"{path.name}: {MANIFEST} is missing, cut off or no regular file") from None
    if not isinstance(manifest, dict) or manifest.pop(_SEAL, None) != _seal(manifest):
        raise Damaged(f"{path.name}: {MANIFEST} is not what was written (sha256 differs)")
    found = manifest.get("format")
    if type(found) is int and found > FORMAT:
        by = manifest.get("written_by")
        raise TooNew.of(f"{path}", str(found), str(FORMAT), by if isinstance(by, str) else "")
    if found != FORMAT:
        raise Damaged(f"{path.name}: checkpoint format {found}, this version reads {FORMAT}")
    try:
        msgspec.convert(manifest, _Manifest)  # a stranger's, too: no name leads out of the folder
    except msgspec.ValidationError as error:
        raise Damaged(f"{path.name}: {MANIFEST} is not what was written ({error})") from None
    if not {TRAINER, *(name for _, name in manifest["shards"])} <= manifest["files"].keys():
        raise Damaged(f"{path.name}: {MANIFEST} lacks entries")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    """Hash everything else in a manifest, the names of the shards and the step included."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _described(path: Path, step: int, manifest: dict[str, Any]) -> Checkpoint:
    total = sum(file.bytes for file in manifest["files"].values())
    shards = tuple((name, file_name) for name, file_name in manifest["shards"])
    return Checkpoint(path=path, step=step, bytes=total, shards=shards)
