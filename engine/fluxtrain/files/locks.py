"""Locks on files, which the kernel drops with the process that holds them, whatever ends it.

A lock belongs to an open file and not to its name: a file that was replaced or removed meanwhile
locks nothing, so who takes a lock looks whether the name still leads to it (`is_at`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fluxtrain.files.opening import open_to_write

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


@contextlib.contextmanager
def if_left(path: Path) -> Iterator[bool]:
    """Lock a file that is there, and say whether nobody else holds it, so that what it guards is
    left over. Raises OSError where it cannot be opened or locked."""
    descriptor = open_to_write(path, os.O_RDWR)
    try:
        yield try_lock(descriptor) and is_at(path, descriptor)
    finally:
        os.close(descriptor)
