"""Writes small files that are whole or absent; turns failed writes into errors for the user."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.units import bytes_text

JSON_LIMIT_BYTES = 32 << 20  # a plan of a hundred thousand blocks is smaller
NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def storage_error(path: Path, error: OSError, needed_bytes: int | None = None) -> FluxTrainError:
    """Return the error to raise for a failed write at `path`: `NoSpace` (5) or `BadInput` (2)."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno not in NO_SPACE_ERRNOS:
        return BadInput(
            f"cannot write {path}: {reason}: choose a folder that you can write with --run-dir, "
            "or set FLUXTRAIN_RUNS"
        )
    needed = "" if needed_bytes is None else f"{bytes_text(needed_bytes)} needed, "
    return NoSpace(
        f"cannot write {path}: {reason} ({needed}{bytes_text(free_bytes(path))} free): "
        "free some space, raise the quota, or choose another disk with --run-dir"
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
            "free some space, or choose another disk with --run-dir"
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


def open_to_read(path: Path) -> io.FileIO:
    """Open a file without a buffer; OSError for a pipe or a device, whose reading may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    except OSError:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor, "rb")


def unlinked(path: str, flags: int) -> int:
    """Open for `open` without following a link at the path's end (OSError), whose target may belong
    to another user."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`; None if the file is missing, no JSON object, or too large."""
    try:
        with open_to_read(path) as file:
            data = file.read(JSON_LIMIT_BYTES + 1)
        if len(data) > JSON_LIMIT_BYTES:
            return None
        return msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut; it is no error if the file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
