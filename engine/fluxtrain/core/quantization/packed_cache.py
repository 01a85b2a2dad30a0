"""Keeps packed models on disk, so that a second start reads packed bytes and packs nothing.

    with PackedCache.open(cache_key(...), {name: size_bytes, ...}, say) as cache:
        for each group:
            if not cache.read_into(name, packed):
                ...                           # pack the group's weights into `packed`
                cache.add(name, packed)

A model has one file. While it is written it has another name, and a journal beside it says which
groups are on the disk: a run that follows a killed one reads those and packs the rest. When all are
there the file is renamed. No trouble with the cache stops a run or changes its weights: `say` tells
what happened, and the run packs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fluxtrain.core.quantization.cache_file import Contents, Pieces, read_header
from fluxtrain.files.atomic import sync
from fluxtrain.files.cache import Damaged, cache_root
from fluxtrain.files.locks import if_left, is_at, try_lock
from fluxtrain.files.opening import open_to_write
from fluxtrain.plan.states import PackedFormat
from fluxtrain.units import GIB

RECIPE = 1  # raise it when packing would write other bytes
_LENGTH_BYTES = 8  # of the header of a safetensors file, at its beginning
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit

Parameter = tuple[str, tuple[int, ...], torch.dtype]
_MOST_THREADS = 8
_LEFT_FREE_BYTES = GIB  # of the disk
_FORGOTTEN_S = 7 * 86_400.0  # after so long nobody goes on with a file that is not whole
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not be as large",
}

Say = Callable[[str], None]


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/fluxtrain/packed, below ~/.cache without it."""
    return cache_root() / "packed"


class PackedCache:
    """The packed groups of one model on disk. One thread may use it."""

    def __init__(self, contents: Contents, folder: Path, say: Say) -> None:
        self._contents = contents
        self._path = folder / f"{contents.key}.packed"
        self._partial = folder / f"{contents.key}.partial"
        self._journal_path = folder / f"{contents.key}.journal"
        self._say = say
        self._pieces = Pieces(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="packed-cache-writer")
        self._writing: list[Future[None]] = []
        self._checksums: dict[str, str] = {}
        self._fd: int | None = None  # of the file, whole or partial
        self._journal: int | None = None  # while it is partial
        self._trouble: str | None = None

    @staticmethod
    def open(
        key: str, groups: Mapping[str, int], say: Say, folder: Path | None = None
    ) -> PackedCache:
        """Open the model `key`, with groups of these names and sizes in bytes, or begin its file.

        say: called with each sentence for the user. folder: `cache_folder()` by default.
        """
        cache = PackedCache(Contents.of(key, groups), folder or cache_folder(), say)
        try:
            if not cache._open_whole():
                cache._open_partial()
        except OSError as error:
            cache._give_up(error)
        return cache

    @property
    def is_whole(self) -> bool:
        """True when all groups were on disk, under the file's last name."""
        return self._fd is not None and self._journal is None

    @property
    def path(self) -> Path:
        """The file's name once it is whole."""
        return self._path

    @property
    def size_bytes(self) -> int:
        """Count the bytes of the whole file."""
        return self._contents.size_bytes

    def holds(self, name: str) -> bool:
        """Return whether the group is on disk, as far as is known without reading it."""
        return self._fd is not None and name in self._checksums

    def read_into(self, name: str, out: Tensor) -> bool:
        """Read a group into out (bytes,) uint8 on the host, page-locked or not, and check it.

        Returns False if it is not there or is damaged: then pack it, and `add` it.
        """
        if not self.holds(name):
            return False
        assert out.nbytes == self._contents.sizes[name], (name, out.nbytes)
        assert self._fd is not None
        try:
            found = self._pieces.read(self._fd, self._contents.offsets[name], out)
            if found == self._checksums[name]:
                return True
            trouble = "its bytes are not those that were written"
        except (OSError, Damaged) as error:
            trouble = str(error)
        self._say(f"{name} in the packed model {self._path} is damaged ({trouble}): packed anew")
        if not self.is_whole:
            del self._checksums[name]
        return False

    def add(self, name: str, packed: Tensor) -> None:
        """Write a group from packed (bytes,) uint8 on the host, behind the caller's back.

        `packed` must not change before `close`.
        """
        assert packed.nbytes == self._contents.sizes[name], (name, packed.nbytes)
        if self._fd is not None and self._trouble is None:
            self._writing.append(self._behind.submit(self._write, name, packed))

    def close(self, *, abandon: bool = False) -> None:
        """Wait until what was added is on the disk; with all groups there, rename the file.

        abandon: wait for the group that is being written alone. The next start reads what is there.
        """
        self._behind.shutdown(cancel_futures=abandon)
        for written in self._writing:
            if not written.cancelled():
                written.result()
        self._writing.clear()
        try:
            if self._journal is not None and len(self._checksums) == len(self._contents.sizes):
                self._finish()
        except OSError as error:
            self._give_up(error)
        self._pieces.close()
        self._close_files()

    def __enter__(self) -> PackedCache:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(abandon=error is not None)

    def _open_whole(self) -> bool:
        """Open the file under its last name, if it is there and holds these groups."""
        try:
            fd = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        except PermissionError:  # of another user
            fd = os.open(self._path, os.O_RDONLY)
        try:
            self._checksums = read_header(fd, self._contents)
        except Damaged as error:
            os.close(fd)
            self._say(f"the packed model {self._path} cannot be used ({error}): it is made anew")
            return False
        self._fd = fd
        return True

    def _open_partial(self) -> None:
        """Lock and open the file that is being written, with the groups that its journal names."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _remove_forgotten(self._path.parent)
        fd = open_to_write(self._partial, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(fd):
            os.close(fd)
            self._trouble = "another process"
            self._say(f"another process writes the packed model {self._path}: this one does not")
            return
        if not is_at(self._partial, fd):  # its writer has just finished and renamed it
            os.close(fd)
            if not self._open_whole():
                self._open_partial()
            return
        self._fd = fd
        self._journal = os.open(self._journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._checksums = self._read_journal()
        self._refuse_without_room()

    def _read_journal(self) -> dict[str, str]:
        """Return the checksums of the groups on disk. A line cut off by a kill ends the journal."""
        assert self._journal is not None
        checksums: dict[str, str] = {}
        valid_bytes = 0
        size = os.fstat(self._journal).st_size
        for line in os.pread(self._journal, size, 0).splitlines(keepends=True):
            try:
                key, name, group_size, checksum = json.loads(line)
            except ValueError:
                break
            is_known = key == self._contents.key and self._contents.sizes.get(name) == group_size
            if not is_known or not line.endswith(b"\n"):
                break
            checksums[name] = checksum
            valid_bytes += len(line)
        os.ftruncate(self._journal, valid_bytes)
        return checksums

    def _refuse_without_room(self) -> None:
        missing = sum(
            size for name, size in self._contents.sizes.items() if name not in self._checksums
        )
        folder = self._path.parent
        free = shutil.disk_usage(folder).free
        others = sum(path.stat().st_size for path in folder.glob("*.packed"))
        if missing + _LEFT_FREE_BYTES > free:
            self._trouble = "no room"
            self._say(
                f"no packed model is kept: it takes {missing / GIB:.1f} GiB and {folder} has "
                f"{free / GIB:.1f} GiB free (packed models there take {others / GIB:.1f} GiB: "
                "delete those that you no longer need); the next start packs again"
            )
            if not self._checksums:
                self._remove_partial()

    def _write(self, name: str, packed: Tensor) -> None:
        """Write one group and then its line in the journal; runs on the writer's thread."""
        if self._trouble is not None:
            return
        assert self._fd is not None
        try:
            if self._journal is None:
                self._repair(name, packed)
                return
            checksum = self._pieces.write(self._fd, self._contents.offsets[name], packed)
            os.fdatasync(self._fd)
            line = json.dumps([self._contents.key, name, packed.nbytes, checksum]) + "\n"
            os.write(self._journal, line.encode())
            self._checksums[name] = checksum
        except OSError as error:
            self._give_up(error)

    def _repair(self, name: str, packed: Tensor) -> None:
        """Write a damaged group of a whole file again, where the header's checksum is that of these
        bytes: readers of the same file check what they get. Remove the file otherwise."""
        assert self._fd is not None
        if self._pieces.checksum(packed) == self._checksums[name]:
            self._pieces.write(self._fd, self._contents.offsets[name], packed)
            os.fdatasync(self._fd)
        else:
            self._path.unlink(missing_ok=True)
            self._say(f"the packed model {self._path} held other weights: it was removed")

    def _finish(self) -> None:
        """Write the header, and give the file its name once all is on the disk."""
        assert self._fd is not None and self._journal is not None
        os.ftruncate(self._fd, self._contents.size_bytes)
        os.pwrite(self._fd, self._contents.header(self._checksums), 0)
        os.fsync(self._fd)
        self._partial.rename(self._path)
        self._journal_path.unlink(missing_ok=True)
        sync(self._path.parent)

    def _give_up(self, error: OSError) -> None:
        """Go on without the cache, and free what it took of a full disk."""
        self._trouble = _REASONS.get(error.errno or 0, error.strerror or str(error))
        if self.is_whole:
            self._say(f"the packed model {self._path} stays damaged ({self._trouble})")
            return
        if self._journal is not None:
            self._remove_partial()
        self._say(
            f"no packed model is kept in {self._path.parent} ({self._trouble}): "
            "the next start packs again"
        )

    def _remove_partial(self) -> None:
        self._partial.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def _close_files(self) -> None:
        for fd in (self._fd, self._journal):
            if fd is not None:
                os.close(fd)
        self._fd = self._journal = None


def _remove_forgotten(folder: Path) -> None:
    """Remove unfinished files of other models that nobody has written to for a week."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            if time.time() - partial.lstat().st_mtime < _FORGOTTEN_S:
                continue
            with if_left(partial) as is_left:
                if is_left:
                    partial.with_suffix(".journal").unlink(missing_ok=True)
                    partial.unlink()


def cache_key(
    format: PackedFormat,
    shards: Sequence[Path],
    parameters: Sequence[Parameter],
    more: Sequence[str] = (),
) -> str:
    """Return 32 hexadecimal digits for weights packed in `format`.

    shards: the model's files. parameters: name, shape and dtype, as loaded, of each packed weight,
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
