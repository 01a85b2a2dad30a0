"""Folders that are made next to their final place, and cleared where their maker was killed.

Each holds a mark, a file that its maker keeps locked as long as it lives: the kernel drops the lock
with the process, whatever ends it. A folder whose mark nobody locks is left over.

A lock belongs to an open file and not to its name: a file that was replaced or removed meanwhile
locks nothing, so code that takes a lock looks whether the name still leads to it (`is_at`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fluxtrain.files.opening import open_to_write

MARK = ".fluxtrain-unfinished"
_NAME = re.compile(r"\..+-[a-z0-9_]{8}")  # of `tempfile.mkdtemp`, with a prefix
_TRIES = 100


@contextlib.contextmanager
def unfinished_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder in `parent`, named by a `prefix` that begins with a dot and ends with a dash;
    remove it in the end, unless it was renamed. What killed processes left there goes first.

    `finish` takes the mark away before the folder gets its final name. Raises OSError.
    """
    remove_left(parent)
    folder, lock = _made(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def finish(folder: Path) -> None:
    """Remove the mark from a complete folder. Raises OSError."""
    (folder / MARK).unlink(missing_ok=True)


def remove_left(parent: Path) -> None:
    """Remove the folders that killed processes made with `unfinished_folder`; those of living
    processes stay, and so does every folder without a mark."""
    try:
        names = os.listdir(parent)
    except OSError:
        return
    for name in names:
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                _remove_if_left(parent / name)


def _made(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder with a locked mark; try again where another process took it for a leftover."""
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = open_to_write(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:
            continue
        except BaseException:
            folder.rmdir()
            raise
        try:
            is_ours = try_lock(lock) and is_at(folder / MARK, lock)
        except OSError:  # without locks on this disk nobody takes it for left
            is_ours = True
        if is_ours:
            return folder, lock
        os.close(lock)
    raise OSError(errno.EAGAIN, "new folders vanish at once", os.fspath(parent))


def _remove_if_left(folder: Path) -> None:
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        return
    with if_left(folder / MARK) as is_left:
        if is_left:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, its mark last, so that a kill meanwhile leaves none without a mark."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != MARK:
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)


_HELD = (errno.EWOULDBLOCK, errno.EACCES)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; return False where another process holds it.

    Raises OSError on a disk that has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def wait_for_lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file, once no other process holds it. Raises OSError as `try_lock`."""
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether a name still leads to an open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


def leads_to(path: Path, descriptor: int) -> bool:
    """Return whether a path, also through links, leads to an open file or folder."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


@contextlib.contextmanager
def if_left(path: Path) -> Iterator[bool]:
    """Lock an existing file, and yield whether nobody else holds it, so that the guarded folder is
    a leftover. Raises OSError where it cannot be opened or locked."""
    descriptor = open_to_write(path, os.O_RDWR)
    try:
        yield try_lock(descriptor) and is_at(path, descriptor)
    finally:
        os.close(descriptor)
