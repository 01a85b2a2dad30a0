"""Writes small files that are whole or absent; turns failed writes into errors for the user."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.plain_files import read_plain
from fluxtrain.unfinished.temporary import FULL, moved_by
from fluxtrain.units import bytes_text

NO_SPACE_ERRNOS = FULL


def storage_error(path: Path, error: OSError, needed_bytes: int | None = None) -> FluxTrainError:
    """Return the error to raise for a failed write at `path`: `NoSpace` (5) or `BadInput` (2)."""
    reason = error.strerror or str(error)
    if error.errno not in NO_SPACE_ERRNOS:
        cure = moved_by(path) or (
            "choose a folder that you can write with --run-dir, or set FLUXTRAIN_RUNS"
        )
        return BadInput(f"cannot write {path}: {reason}: {cure}")
    needed = "" if needed_bytes is None else f"{bytes_text(needed_bytes)} needed, "
    return NoSpace(
        f"cannot write {path}: {reason} ({needed}{bytes_text(free_bytes(path))} free): "
        f"free some space, raise the quota, or {_other_disk(path)}"
    )


def free_bytes(path: Path) -> int | None:
    """Return how many bytes this user may write on the file system of `path` or its parent."""
    for place in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(place).free
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


def write_bytes(path: Path, content: bytes) -> None:
    """Write `path` so that readers, also after a power cut, see the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a planted link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error, len(content)) from error
    finally:  # absent after the replace; a signal may come before it
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Atomic JSON, indented for people. A float that is not finite becomes null."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any] | None:
    """Return the object in `path`; None if the file is missing, no regular file, no JSON object, or
    too large. A link is followed if `follow`."""
    try:
        return msgspec.json.decode(read_plain(path, follow=follow), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _other_disk(path: Path) -> str:
    return moved_by(path) or "choose another disk with --run-dir"


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut; it is no error if the file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
