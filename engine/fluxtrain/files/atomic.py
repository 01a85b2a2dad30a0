"""Writes files and folders that are whole or absent; words failed writes for the user."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.files.folders import MARK, finish, unfinished_folder
from fluxtrain.files.opening import read_plain
from fluxtrain.files.temporary import FULL, moved_by
from fluxtrain.units import bytes_text

_log = logging.getLogger(__name__)
LEFT = re.compile(r"\..+\.\d+(\.tmp)?")  # names of what a killed `replace_file` leaves
_Facts = tuple[int, int, int, int]


def storage_error(
    path: Path, error: OSError, needed_bytes: int | None = None, option: str = "--run-dir"
) -> FluxTrainError:
    """Return the error to raise for a failed write at `path`, which `option` names another of:
    `NoSpace` (5) or `BadInput` (2)."""
    reason = error.strerror or str(error)
    if error.errno not in FULL:
        cure = moved_by(path) or f"choose a folder that you can write with {option}"
        if option == "--run-dir" and not moved_by(path):
            cure += ", or set FLUXTRAIN_RUNS"
        return BadInput(f"cannot write {path}: {reason}: {cure}")
    needed = "" if needed_bytes is None else f"{bytes_text(needed_bytes)} needed, "
    return NoSpace(
        f"cannot write {path}: {reason} ({needed}{bytes_text(free_bytes(path))} free): "
        f"free some space, raise the quota, or {_other_disk(path, option)}"
    )


def free_bytes(path: Path) -> int | None:
    """Return how many bytes this user may write on the file system of `path` or its parent."""
    usage = disk_usage(path)
    return None if usage is None else usage.free


def disk_usage(path: Path) -> shutil._ntuple_diskusage | None:
    """Return total, used and free bytes of the file system of `path` or its parent."""
    for place in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(place)
        except OSError:
            continue
    return None


def check_space(path: Path, needed_bytes: int) -> None:
    """Raise `NoSpace` if fewer than `needed_bytes` are free at `path`; unknown counts as enough."""
    free = free_bytes(path)
    if free is not None and free < needed_bytes:
        raise NoSpace(
            f"{path} needs {bytes_text(needed_bytes)} and {bytes_text(free)} is free: "
            f"free some space, or {_other_disk(path)}"
        )


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write, which becomes `path` in the end: readers, also after a power cut, see
    the old or the new content. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a planted link
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # some file systems cannot
            sync(path.parent)
    finally:  # absent after the replace; a signal may come before it
        with contextlib.suppress(OSError):
            temporary.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` as `whole_file` does. Raises OSError."""
    with whole_file(path) as file:
        file.write(content)


def write_bytes(path: Path, content: bytes, option: str = "--run-dir") -> None:
    """Write `path`, which `option` moves, as `replace_file` does. Raises as `storage_error`."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise storage_error(path, error, len(content), option) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, indented for people. A float that is not finite becomes null."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any] | None:
    """Return the object in `path`; None if the file is missing, no regular file, no JSON object, or
    too large. A link is followed if `follow`."""
    try:
        return msgspec.json.decode(read_plain(path, follow=follow), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _other_disk(path: Path, option: str = "--run-dir") -> str:
    return moved_by(path) or f"choose another disk with {option}"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> int:
    """Let `write` fill a new folder, which becomes `folder` once it is complete and on disk.

    Returns the bytes written. Raises what `write` raises, and OSError; an earlier folder of that
    name is left then.
    """
    with unfinished_folder(folder.parent, f".{folder.name}-") as made:
        earlier = _facts(folder)
        write(made)
        files = [path for path in made.rglob("*") if path.is_file() and path != made / MARK]
        for path in files:
            sync(path)
        finish(made)
        sync(made)
        _take_place(made, folder, earlier)
        folder.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would keep other users from it
        sync(folder.parent)
        return sum((folder / path.relative_to(made)).stat().st_size for path in files)


def _take_place(made: Path, folder: Path, earlier: Set[_Facts]) -> None:
    """Replace `folder` by `made`; remove the old one only after it was moved aside, and only if it
    holds what it did when writing began (`earlier`)."""
    with contextlib.suppress(OSError):  # an empty folder, too, is replaced at once
        made.rename(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(aside / folder.name)
    made.rename(folder)
    if not _facts(aside / folder.name) <= earlier:
        kept = aside.rename(folder.parent / f"kept-from-{folder.name}{aside.name[-9:]}")
        _log.warning("%s changed while it was saved: what it held is in %s", folder, kept)
        return
    shutil.rmtree(aside, ignore_errors=True)


def _facts(folder: Path) -> Set[_Facts]:
    """Return facts that distinguish the files in a folder, or the file in its place,
    from others."""
    found = set()
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            facts = os.lstat(path)
            if not stat.S_ISDIR(facts.st_mode):
                found.add((facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return found


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
