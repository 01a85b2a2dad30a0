"""Opens files that somebody else may have made: regular ones of bounded size, never through a link.

A path that the user names may be a link (`follow=True`). What is found inside a folder may not,
or the folder would choose which files of this machine are read and written: docs/security.md.
"""

from __future__ import annotations

import errno
import io
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from fluxtrain.errors import BadInput, ReadFailed

T = TypeVar("T")

JSON_LIMIT_BYTES = 32 << 20  # a plan or a manifest of a hundred thousand blocks is smaller
BEGUN_S, SILENT_S = 5.0, 120.0  # how long a pipe is waited for: the shell opens its own at once
PIPE_PERIOD_S = 0.02
PAUSES_S = (0.5, 2.0, 8.0)  # before a failed read is done again
STUCK_S = 60.0  # a read that takes longer is repeated meanwhile
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)  # network, loose cable
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def whole(path: Path) -> Path:
    """Return a path from the root, without `..`: links before one are followed."""
    path = path.absolute()
    return path.resolve() if ".." in path.parts else path


def open_plain(path: Path, *, follow: bool = False) -> io.FileIO:
    """Open a regular file without a buffer, and without waiting.

    Raises OSError for everything else: a pipe or a device, whose reading may never end, and a link
    unless `follow`.
    """
    return io.FileIO(_opened(path, os.O_RDONLY, follow=follow), "rb")


def read_plain(path: Path, limit_bytes: int = JSON_LIMIT_BYTES, *, follow: bool = False) -> bytes:
    """Return the content of a regular file. Raises OSError for what `open_plain` refuses, and for
    more than `limit_bytes`."""
    with open_plain(path, follow=follow) as file:
        parts, left = [], limit_bytes + 1
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise _too_large(path, limit_bytes)
    return b"".join(parts)


def read_named(
    path: Path,
    limit_bytes: int = JSON_LIMIT_BYTES,
    *,
    begun_s: float = BEGUN_S,
    silent_s: float = SILENT_S,
) -> bytes:
    """Return the content of a file that the user names, also of a shell's `<(...)`.

    Raises OSError for more than `limit_bytes`, for a pipe whose other end nobody opens within
    `begun_s`, and for one in which nothing comes for `silent_s`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    parts, left, silent_since_s, is_begun = [], limit_bytes + 1, time.monotonic(), False
    with io.FileIO(descriptor, "rb") as file:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        while left > 0:
            part = file.read(min(left, 1 << 20))
            if part:
                parts.append(part)
                left -= len(part)
                silent_since_s, is_begun = time.monotonic(), True
                continue
            is_begun |= part is None  # somebody has it open, and wrote nothing yet
            if part is not None and (is_begun or not is_pipe):
                return b"".join(parts)
            wait_s = silent_s if is_begun else begun_s
            if time.monotonic() - silent_since_s > wait_s:
                raise OSError(errno.ETIMEDOUT, f"nothing came for {wait_s:g} s", os.fspath(path))
            time.sleep(PIPE_PERIOD_S)
    raise _too_large(path, limit_bytes)


def read_again(read: Callable[[], T], path: Path, stuck_s: float | None = None) -> T:
    """Return the result of `read`; repeat it where the disk fails, or does not answer in `stuck_s`
    seconds (None: reading may take its time).

    Raises ReadFailed after several attempts, and other errors at once.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return read() if stuck_s is None else _answered(read, stuck_s)
        except TimeoutError as error:
            reason = str(error)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            reason = error.strerror or str(error)
        if pause_s is not None:
            time.sleep(pause_s)
    raise ReadFailed(
        f"{path} cannot be read ({reason}, {len(PAUSES_S) + 1} attempts): look at the disk or the "
        "network that holds it"
    )


def read_range(path: Path, offset: int, count: int, inode: int) -> bytes | None:
    """Return `count` bytes of a file from `offset` on, as `read_again` does; None where it was
    replaced or removed."""
    try:
        return _cached(path, offset, count, inode)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, *_PASSING):
            raise
    return read_again(partial(_from_disk, path, offset, count, inode), path, STUCK_S)


def _cached(path: Path, offset: int, count: int, inode: int) -> bytes | None:
    """Read bytes that are in memory already. Raises BlockingIOError for others."""
    if not hasattr(os, "RWF_NOWAIT"):
        raise BlockingIOError
    return _from_disk(path, offset, count, inode, os.RWF_NOWAIT)


def _from_disk(path: Path, offset: int, count: int, inode: int, flags: int = 0) -> bytes | None:
    try:
        descriptor = _opened(path, os.O_RDONLY, follow=False)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
            return None
        raise
    try:
        if os.fstat(descriptor).st_ino != inode:
            return None
        read, data = 0, bytearray(count)
        while read < count:
            got = os.preadv(descriptor, [memoryview(data)[read:]], offset + read, flags)
            if not got:
                return None  # cut off: a process that mapped it finds out
            read += got
        return bytes(data)
    finally:
        os.close(descriptor)


def _answered(read: Callable[[], T], stuck_s: float) -> T:
    """Call `read` on a thread that is left behind where it takes too long; raises TimeoutError."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((read(), None))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            answers.put((None, error))

    threading.Thread(target=ask, name="read", daemon=True).start()
    try:
        found, error = answers.get(timeout=stuck_s)
    except queue.Empty:
        raise TimeoutError(f"no answer in {stuck_s:g} s") from None
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # None is an answer of `read` too


def open_to_write(path: Path | str, flags: int, mode: int = 0o644) -> int:
    """Open or make a regular file for writing, as `opener` of `open` too; return its descriptor.
    `mode` is that of a new one.

    Raises OSError for a link, whose target may belong to another user, a pipe and a device.
    """
    return _opened(path, flags, follow=False, mode=mode)


def _too_large(path: Path, limit_bytes: int) -> OSError:
    return OSError(errno.EOVERFLOW, f"it has more than {limit_bytes:,} bytes", os.fspath(path))


def _opened(path: Path | str, flags: int, *, follow: bool, mode: int = 0o644) -> int:
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            told = "symbolic links are not followed here"
            raise OSError(errno.ELOOP, told, os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def kind_of(path: Path) -> str:
    """Name what is at a path, itself and not where it leads: `a named pipe`; "" for a regular file
    and for nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "")
    except OSError:
        return ""


def is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder itself, and no link to one."""
    return kind_of(path) == "a folder"


def refuse_odd(files: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """Raise BadInput for existing `files` and `folders` that are something else, such as a link;
    missing ones pass."""
    for paths, fitting in ((files, ("",)), (folders, ("a folder",))):
        for path in paths:
            if os.path.lexists(path) and (kind := kind_of(path)) not in fitting:
                leads = f" to {os.path.realpath(path)}" if path.is_symlink() else ""
                raise BadInput(
                    f"{path} is {kind or 'a file'}{leads}, and a run writes it itself: remove it, "
                    "put what it leads to in its place, or choose another --run-dir"
                )


def refuse_foreign(folder: Path) -> None:
    """Raise BadInput for a model's folder with a link that leads out of it, or with a special file.

    In the hub's cache links lead to the blobs of the same repository. Names that begin with a dot
    are no part of a model.
    """
    folder = Path(os.path.realpath(folder))
    for path in _entries(folder):
        kind = kind_of(path)
        if kind == "a symbolic link":
            if (target := leaves(path, folder)) is not None:
                raise BadInput(
                    f"{path} is a link to {target}, outside of the model's folder: put a copy of "
                    "the file in its place, or name the folder that it leads to"
                )
            kind = kind_of(Path(os.path.realpath(path)))
        if kind not in ("", "a folder"):
            raise BadInput(f"{path} is {kind}, and a model has none: remove it from the folder")


def leaves(link: Path, folder: Path) -> Path | None:
    """Return where a link leads, if that is outside of `folder` and not one of the hub cache's
    blobs; None if it stays inside."""
    real, root = Path(os.path.realpath(link)), Path(os.path.realpath(folder))
    if real.is_relative_to(root):
        return None
    for snapshots in root.parents[:1]:
        if snapshots.name == "snapshots" and real.parent == snapshots.parent / "blobs":
            return None
    return real


def _entries(folder: Path) -> Iterator[Path]:
    for here, inner, names in os.walk(folder, followlinks=False):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(here, name) for name in (*inner, *names) if not name.startswith("."))
