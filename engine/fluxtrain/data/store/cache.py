"""The folder of cached tokens: an entry for each data set, tokenizer and way of reading.

An entry is built by one process, with the exclusive lock of `lock`; others wait for it. Readers
hold a shared lock of `used`, so an entry in use is never removed; it may be built anew meanwhile,
as they have its old files mapped. Entries that nobody used for a month are removed.

The folder may hold other things, and may be named by a run that was made elsewhere: an entry has a
name that no other folder has, holds its own files alone, and no links.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fluxtrain.data.encoding.tokenizer import Tokenizer
from fluxtrain.data.store.shards import StoredTokens, can_go_on
from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.files.atomic import LEFT
from fluxtrain.files.cache import Damaged, cache_root, read_sealed, write_sealed
from fluxtrain.files.folders import if_left, try_lock, wait_for_lock
from fluxtrain.files.opening import is_plain_folder, kind_of, open_to_write
from fluxtrain.files.temporary import FULL, free_text

VERSION = 4  # raise it when the same data would become other tokens, or other files
ENDS = 1 << 16  # bytes of a file's beginning and end that its key looks at
UNUSED_S = 30 * 24 * 3600.0
_USED, _LOCK, _COMPLETE = "used", "lock", "complete.json"
PARTS = ("trained", "held-out")
_OWN = frozenset({_USED, _LOCK, _COMPLETE, *PARTS, "rows"})  # rows: of earlier versions
_KEY = re.compile(r"[0-9a-f]{32}")
_SETTINGS = ("add_bos_token", "add_eos_token", "split_special_tokens", "legacy")  # of a tokenizer


class NotKept(FluxTrainError):
    """The tokens of the data cannot be kept on the disk."""


class _Full(NotKept, NoSpace):
    """The disk of the cache is full."""


class _Closed(NotKept, BadInput):
    """The folder of the cache cannot be written."""


class CachedTokens:
    """A data set in the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: int | None = None  # the descriptor with the shared lock, until the process ends

    def opened(self, names: Sequence[str]) -> tuple[list[StoredTokens], list[str]] | None:
        """Return the tokens of the parts and their facts; None: not built, or damaged.

        The entry stays locked against removal from now on.
        """
        self._hold()
        try:
            told = read_sealed(self.folder / _COMPLETE)["told"]
            found = [StoredTokens(self.folder / name) for name in names]
        except Damaged:
            self._let_go()
            return None
        with suppress(OSError):  # a folder of somebody else, or one that is only read
            os.utime(self.folder / _COMPLETE)
        return found, told

    def _refuse_odd(self) -> None:
        """Raise BadInput for an entry that is a link, or holds one: it would lead elsewhere."""
        is_there = os.path.lexists(self.folder)
        inner = self.folder.rglob("*") if is_plain_folder(self.folder) else ()
        for path in (self.folder, *inner) if is_there else ():
            kind = kind_of(path)
            if kind not in ("", "a folder") or (path == self.folder and not kind):
                raise BadInput(
                    f"{path} is {kind or 'a file'}, and tokens of the data are kept there: remove "
                    "it, or name another folder in data.token_cache"
                )

    def _hold(self) -> None:
        """Lock the entry against removal; one that cannot be written needs no lock."""
        self._refuse_odd()
        if self._held is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._held = open_to_write(self.folder / _USED, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                if not (self.folder / _COMPLETE).is_file():
                    raise _unwritable(self.folder, error) from error
                return
        wait_for_lock(self._held, shared=True)

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)  # the file goes with the entry
            self._held = None

    def complete(self, told: list[str]) -> None:
        """Note that the entry is whole."""
        write_sealed(self.folder / _COMPLETE, {"told": told})

    @contextmanager
    def building(self, waits: Callable[[], None]) -> Iterator[None]:
        """Hold the entry alone; `waits` is called once where another process builds it.

        What a killed writer left is kept, but for files that are not whole. Raises NotKept.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # it may have been removed as unused
            descriptor = open_to_write(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        try:
            if not try_lock(descriptor):
                waits()
                wait_for_lock(descriptor)
            for left in self.folder.rglob(".*"):
                if LEFT.fullmatch(left.name):
                    left.unlink(missing_ok=True)
            yield
        except FluxTrainError:  # of the data, or of the disk that it lies on
            raise
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        finally:
            os.close(descriptor)

    def free(self, names: Sequence[str]) -> None:
        """Give back what the entry took of a full disk."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def discard(self, names: Sequence[str]) -> None:
        """Remove complete shards that are damaged; shards of a killed writer are kept."""
        if (self.folder / _COMPLETE).exists():
            (self.folder / _COMPLETE).unlink()
            for name in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in names:
            if (self.folder / name).is_dir() and not can_go_on(self.folder / name):
                shutil.rmtree(self.folder / name, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> NotKept:
    """Return the error for a cache that cannot be written."""
    cure = "name another folder in data.token_cache, or set it to off"
    if error.errno in FULL:
        return _Full(
            f"no space left for the tokens of the data in {folder.parent} ({error.strerror}; "
            f"{free_text(folder.parent)} free): make room, or {cure}"
        )
    return _Closed(
        f"the tokens of the data cannot be kept in {folder.parent} ({error.strerror}): {cure}"
    )


def cache_folder(wished: str) -> Path:
    """Return the folder of the cache: `wished`, or for auto one in the user's cache."""
    if wished != "auto":
        return Path(wished).expanduser()
    return cache_root() / "tokens"


def holds_entries(folder: Path) -> bool:
    """Return whether a folder was used as a cache before."""
    return any(_is_entry(entry.parent) for entry in folder.glob(f"*/{_USED}"))


def _is_entry(folder: Path) -> bool:
    """Return whether a folder is an entry, with nothing else in it."""
    return (
        _KEY.fullmatch(folder.name) is not None
        and is_plain_folder(folder)
        and all(name in _OWN or LEFT.fullmatch(name) for name in os.listdir(folder))
    )


def forget_unused(folder: Path, now_s: float | None = None) -> None:
    """Remove entries that nobody used for a month and nobody holds."""
    limit = (time.time() if now_s is None else now_s) - UNUSED_S
    for entry in folder.glob(f"*/{_USED}"):
        with suppress(OSError):  # another process removes it too, or it is somebody else's
            if not _is_entry(entry.parent):
                continue
            complete = entry.with_name(_COMPLETE)
            newest = complete if complete.exists() else entry
            if newest.stat().st_mtime > limit:
                continue
            with if_left(entry) as is_left:
                if is_left:
                    shutil.rmtree(entry.parent, ignore_errors=True)


def key_of(files: Sequence[Path], settings: Any, tokenizer: Tokenizer) -> str:
    """Return the name of the entry for files, the way they are read, and a tokenizer."""
    made = blake2b(repr((VERSION, settings)).encode(), digest_size=16)
    for path in files:
        found = path.stat()
        made.update(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
        with path.open("rb") as file:
            made.update(file.read(ENDS))
            file.seek(max(0, found.st_size - ENDS))
            made.update(file.read(ENDS))
    made.update(_tokenizer_key(tokenizer))
    return made.hexdigest()


def _tokenizer_key(tokenizer: Any) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    facts = (
        type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.chat_template,
        *(getattr(tokenizer, name, None) for name in _SETTINGS),
        sorted((number, str(token)) for number, token in tokenizer.added_tokens_decoder.items()),
    )  # fmt: skip
    return blake2b(repr((vocabulary, facts)).encode(), digest_size=16).digest()
