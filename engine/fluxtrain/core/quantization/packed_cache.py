"""Keeps packed models on disk, so that a second start reads packed bytes and packs nothing.

    with PackedCache(cache_key(...), {name: size_bytes, ...}, say) as cache:
        for each group:
            if not cache.read_into(name, packed):
                ...                           # pack the group's weights into `packed`
                cache.add(name, packed)

A model has a folder, and each group a file there: its bytes as they are in memory, then its
checksum. So direct reads, which begin at pages, can take a group to the device: a file is the home
of a group that the host does not hold (`home_of`). A file is written under another name and renamed
once it is complete, so a run that follows a killed one reads the groups that are there and packs
the rest. What a power cut damages has another checksum and is packed again. No trouble with the
cache stops a run or changes its weights, but where weights live in it: `say` tells what happened,
and the run packs.

A checksum is the sha256 of the sha256 of a group's pieces, so that several threads share the work.
A thread hashes 1.4 GB/s (an EPYC core; blake2b 0.5, CRC-32 2.0), a fast disk reads 3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.files.atomic import free_bytes
from fluxtrain.files.cache import cache_root
from fluxtrain.plan.states import StorageFormat
from fluxtrain.units import GIB, bytes_text

RECIPE = 2  # raise it when packing would write other bytes
PIECE_BYTES = 8 << 20
_HASH_BYTES = 32
_LENGTH_BYTES = 8  # of the header of a safetensors file, at its beginning
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit
_MOST_THREADS = 8
_LEFT_FREE_BYTES = GIB  # of the disk
_ABANDONED_S = 3600.0  # a file takes seconds to write

Parameter = tuple[str, tuple[int, ...], torch.dtype]
Say = Callable[[str], None]


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/fluxtrain/packed, below ~/.cache without it."""
    return cache_root() / "packed"


class PackedCache:
    """The packed groups of one model on disk. One thread may use it."""

    def __init__(
        self,
        key: str,
        groups: Mapping[str, int],
        say: Say,
        folder: Path | None = None,
        *,
        homes: Iterable[str] = (),
    ) -> None:
        """Open the model `key`, with groups of these names and sizes in bytes.

        say: called with each sentence for the user. folder: `cache_folder()` by default. homes:
        the groups that live in their files. Raises NoSpace where the disk has no room for these.
        """
        self._folder = (folder or cache_folder()) / key
        self._paths = {name: self._folder / f"{at}.packed" for at, name in enumerate(groups)}
        self._sizes = dict(groups)
        self._say = say
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="packed-cache")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="packed-cache-writer")
        self._writes: list[Future[None]] = []
        self._written: list[Path] = []
        self._homes: list[Path] = []  # that this start has written
        self._writable: bool | None = None  # not looked at yet
        self._refuse_without_room(list(homes))

    def read_into(self, name: str, out: Tensor) -> bool:
        """Read a group into out (bytes,) uint8 on the host, page-locked or not, and check it.

        Returns False if it is not there or is damaged: then pack it, and `add` it.
        """
        assert out.nbytes == self._sizes[name], (name, out.nbytes)
        try:
            with self._paths[name].open("rb", buffering=0) as file:
                found = self._read(file.fileno(), out)
                if found == os.pread(file.fileno(), _HASH_BYTES, out.nbytes):
                    return True
            trouble = "its bytes are not those that were written"
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            trouble = str(error)
        self._say(f"{name} in the packed model {self._folder} is damaged ({trouble}): packed anew")
        return False

    def add(self, name: str, packed: Tensor) -> None:
        """Write a group from packed (bytes,) uint8 on the host, in the background.

        `packed` must not change before the end of the `with` block.
        """
        assert packed.nbytes == self._sizes[name], (name, packed.nbytes)
        if self._writable is None:
            try:
                self._writable = self._has_room()
            except OSError:  # writing will tell
                self._writable = True
        self._writes.append(self._writer.submit(self._write, self._paths[name], packed))

    def home_of(self, name: str, stored: Tensor | None) -> Path:
        """Return the file that holds a group's weights for good, where the host does not keep
        them. `stored` (bytes,) uint8 on the host is written to it first, and none of it stays in
        memory.

        Raises NoSpace where the disk is full, BadInput where the folder cannot be written to.
        """
        path = self._paths[name]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            if stored is not None:
                self._write_to(temporary, path, stored)
                self._homes.append(path)
            with path.open("rb") as file:
                os.fdatasync(file.fileno())  # else its pages cannot be given up
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._remove(temporary, *self._homes)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            free = free_bytes(self._folder.parent)
            raise (NoSpace if full else BadInput)(
                f"{name} must live on disk, as the host does not hold it, and {self._folder} does "
                f"not take its {bytes_text(self._sizes[name])} ({error.strerror or error}; "
                f"{bytes_text(free)} free there): free some of it, set XDG_CACHE_HOME to a folder "
                "on another disk, or close other programs so that the host holds more"
            ) from error
        return path

    def __enter__(self) -> PackedCache:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Wait until added groups are written; after an error only for the present one."""
        self._writer.shutdown(cancel_futures=error is not None)
        self._threads.shutdown()
        for write in self._writes:
            if not write.cancelled():
                write.result()

    def _room(self, names: Iterable[str]) -> tuple[int, int | None]:
        """Return the bytes of the groups that are not there, with what is to be left free, and what
        is free."""
        missing = sum(self._sizes[name] for name in names if not self._paths[name].exists())
        need = missing + _LEFT_FREE_BYTES if missing else 0
        return need, free_bytes(self._folder.parent)

    def _has_room(self) -> bool:
        """Tell whether the disk has room for the groups that are not there; say so if not."""
        need, free = self._room(self._paths)
        if free is None or need <= free:
            return True
        self._say(
            f"no packed model is kept: it takes {need / GIB:.1f} GiB with what is left free, and "
            f"{self._lack(free)}; the next start packs again"
        )
        return False

    def _refuse_without_room(self, homes: Sequence[str]) -> None:
        need, free = self._room(homes)
        if free is not None and need > free:
            raise NoSpace(
                f"frozen weights that the host does not hold must live on disk; they take "
                f"{need / GIB:.1f} GiB with what is left free, and {self._lack(free)}, or set "
                "XDG_CACHE_HOME to a folder on another disk"
            )

    def _lack(self, free: int) -> str:
        folder = self._folder.parent
        others = sum(path.stat().st_size for path in folder.rglob("*.packed"))
        return (
            f"{folder} has {free / GIB:.1f} GiB free (packed models there take "
            f"{others / GIB:.1f} GiB: delete what you no longer need)"
        )

    def _read(self, fd: int, into: Tensor) -> bytes:
        """Read a group from an open file, and return the checksum of what was read."""

        def one(start: int, piece: memoryview) -> bytes:
            done = 0
            while done < len(piece):
                count = os.preadv(fd, [piece[done:]], start + done)
                if count == 0:
                    break  # the file was cut: so is its checksum another one
                done += count
            return hashlib.sha256(piece[:done]).digest()

        return self._checksum(one, into)

    def _write(self, path: Path, packed: Tensor) -> None:
        """Write one file; runs on the writer's thread."""
        if not self._writable:
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self._write_to(temporary, path, packed)
            self._written.append(path)
        except OSError as error:
            self._give_up(temporary, error)

    def _write_to(self, temporary: Path, path: Path, packed: Tensor) -> None:
        if not self._folder.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._written or self._homes):
            self._remove_abandoned()
        with temporary.open("wb") as file:
            file.write(packed.numpy().data)
            file.write(self._checksum(lambda _, piece: hashlib.sha256(piece).digest(), packed))
        temporary.replace(path)

    def _checksum(self, one: Callable[[int, memoryview], bytes], memory: Tensor) -> bytes:
        whole = memory.numpy().data
        starts = range(0, len(whole), PIECE_BYTES)
        pieces = [whole[start : start + PIECE_BYTES] for start in starts]
        return hashlib.sha256(b"".join(self._threads.map(one, starts, pieces))).digest()

    def _give_up(self, temporary: Path, error: OSError) -> None:
        """Continue without the cache, and free the bytes that this start wrote to a full disk."""
        self._writable = False
        self._remove(temporary, *self._written)
        self._say(
            f"no packed model is kept in {self._folder} ({error.strerror or error}): "
            "the next start packs again"
        )

    def _remove(self, *paths: Path) -> None:
        with suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            self._folder.rmdir()  # refused where an earlier start left groups

    def _remove_abandoned(self) -> None:
        """Remove files that a killed start was writing."""
        for temporary in self._folder.glob(".*.tmp"):
            with suppress(OSError):
                if time.time() - temporary.stat().st_mtime > _ABANDONED_S:
                    temporary.unlink()


def cache_key(
    format: StorageFormat,
    shards: Sequence[Path],
    parameters: Sequence[Parameter],
    more: Sequence[str] = (),
) -> str:
    """Return 32 hexadecimal digits for weights packed in `format`, or kept as they are.

    shards: the model's files. parameters: name, shape and dtype, as loaded, of each kept weight,
    in order. more: what else changes weights before they are packed. Raises OSError for a shard
    that cannot be read.
    """
    facts = [
        RECIPE,
        format,
        sorted(_identity(shard) for shard in shards),
        [[name, list(shape), str(dtype)] for name, shape, dtype in parameters],
        list(more),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _identity(shard: Path) -> list[object]:
    """Return what tells this file from any other: its name in the hub's cache, which is a hash of
    its bytes; else its name, size, time of change and the hash of its header."""
    real = shard.resolve()
    if real.parent.name == "blobs":
        return ["blob", real.name]
    facts = real.stat()
    return ["file", shard.name, facts.st_size, facts.st_mtime_ns, _header_hash(real)]


def _header_hash(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = min(int.from_bytes(start, "little"), _MOST_HEADER_BYTES)
        if path.suffix != ".safetensors":
            length = 0
        return hashlib.sha256(start + file.read(length)).hexdigest()
