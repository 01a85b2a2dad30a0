"""Measures how fast a folder's disk writes and reads, with at most 256 MiB in a few seconds."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from pathlib import Path

from fluxtrain.events.answers.machine import Rate
from fluxtrain.files.atomic import free_bytes
from fluxtrain.units import MIB, bytes_text

SAMPLE_BYTES = 256 * MIB
PIECE_BYTES = 8 * MIB
LEAST_BYTES = 32 * MIB


def disk_rates(
    folder: Path, *, sample_bytes: int = SAMPLE_BYTES, limit_s: float = 2.0
) -> tuple[Rate, Rate]:
    """Measure (write, read) with a file that is deleted afterwards; each stops after `limit_s`.

    Uses direct transfers (O_DIRECT) if the file system has them. Otherwise the write ends with an
    fsync and the read may come from the cache; its `how` says so. Takes at most a tenth of the free
    space; with too little of it nothing is measured.
    """
    free = free_bytes(folder)
    size = sample_bytes if free is None else min(sample_bytes, free // 10)
    size -= size % PIECE_BYTES
    if size < min(LEAST_BYTES, sample_bytes):
        why = f"not measured: {bytes_text(free)} is free in {folder}"
        return Rate(None, why), Rate(None, why)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".fluxtrain-probe-", dir=folder)
    except OSError as error:
        why = f"not measured: cannot write in {folder}: {error.strerror}"
        return Rate(None, why), Rate(None, why)
    try:
        with mmap.mmap(-1, PIECE_BYTES) as piece:  # page aligned, as direct transfers need
            piece.write(os.urandom(MIB) * (PIECE_BYTES // MIB))  # not a hole, not compressible
            direct = _set_direct(descriptor, piece)
            write = _timed_write(descriptor, piece, size, limit_s, direct)
            read = _timed_read(descriptor, piece, limit_s, direct)
        return write, read
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)


def _set_direct(descriptor: int, piece: mmap.mmap) -> bool:
    """Bypass the cache if a first write succeeds that way; some file systems refuse only then."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(descriptor, piece, 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _timed_write(
    descriptor: int, piece: mmap.mmap, size: int, limit_s: float, direct: bool
) -> Rate:
    start_s, written = time.perf_counter(), 0
    try:
        while written < size and time.perf_counter() - start_s < limit_s:
            written += os.pwrite(descriptor, piece, written)
        os.fsync(descriptor)
    except OSError as error:
        return Rate(None, f"not measured: {error.strerror} after {bytes_text(written)}")
    way = "direct" if direct else "with fsync, no direct transfers here"
    return Rate(written / (time.perf_counter() - start_s), f"{bytes_text(written)} {way}")


def _timed_read(descriptor: int, piece: mmap.mmap, limit_s: float, direct: bool) -> Rate:
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    start_s, count = time.perf_counter(), 0
    try:
        while time.perf_counter() - start_s < limit_s:
            got = os.preadv(descriptor, [piece], count)
            count += got
            if got < PIECE_BYTES:
                break
    except OSError as error:
        return Rate(None, f"not measured: {error.strerror} after {bytes_text(count)}")
    if count == 0:
        return Rate(None, "not measured: nothing could be written before")
    way = "direct" if direct else "cached, perhaps"
    return Rate(count / (time.perf_counter() - start_s), f"{bytes_text(count)} {way}")
